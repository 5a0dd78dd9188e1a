"""A KV cache under any sequence of operations, against a model of what it must hold."""

import itertools
import random

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from longtail.engine.batch import FlatBatch, Scheduled
from longtail.engine.kv_cache import KVCache
from longtail.engine.request import ActiveRequest
from longtail.speculation.tree import EMPTY, DraftTree, depths
from longtail.types import Request
from support.tiny_models import tiny_config

CONFIG = tiny_config("llama")
BLOCK = 4
LAYERS, HEADS, KV_HEADS, DIM = 2, CONFIG.num_heads, CONFIG.num_kv_heads, CONFIG.head_dim
# What token i looks like in each layer: queries, keys, values.
LOOKS = torch.randn(
    LAYERS,
    4000,
    HEADS + 2 * KV_HEADS,
    DIM,
    dtype=torch.float64,
    generator=torch.Generator().manual_seed(0),
)


def make_cache(num_tokens: int, max_rows: int, max_len: int) -> KVCache:
    return KVCache(
        CONFIG,
        num_tokens=num_tokens,
        max_rows=max_rows,
        max_len=max_len,
        dtype=torch.float64,
        block_size=BLOCK,
    )


def blocks(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK)


def seen_by_last(tokens: list[int], layer: int, window: int) -> torch.Tensor:
    """Attention of the last token over all of them, written out."""
    first = max(0, len(tokens) - window) if window else 0
    _, keys, values = LOOKS[layer, tokens[first:]].split([HEADS, KV_HEADS, KV_HEADS], 1)
    query, out = LOOKS[layer, tokens[-1], :HEADS], []
    for head in range(HEADS):
        shared = head // (HEADS // KV_HEADS)
        weights = (keys[:, shared] @ query[head] * DIM**-0.5).softmax(0)
        out.append(weights @ values[:, shared])
    return torch.stack(out)


class CacheMachine(RuleBasedStateMachine):
    """A cache against a dict of token lists and one of numbers of blocks."""

    TOTAL, ROWS, MAX_LEN = 80, 4, 60

    def __init__(self) -> None:
        super().__init__()
        self.kv = make_cache(self.TOTAL, self.ROWS, self.MAX_LEN)
        self.blocks: dict[str, int] = {}
        self.held: dict[str, list[int]] = {}
        self.names = (f"r{i}" for i in itertools.count())
        self.fresh = itertools.count()

    def num_free(self) -> int:
        return self.TOTAL // BLOCK - sum(self.blocks.values())

    def grow(self, name: str, num_tokens: int) -> bool:
        """Ask for room; the model knows what the answer must be."""
        held = self.blocks.get(name, 0)
        missing = max(0, blocks(num_tokens) - held)
        is_known = name in self.blocks
        fits = missing <= self.num_free() and (is_known or len(self.blocks) < self.ROWS)
        assert self.kv.try_grow(name, num_tokens) == fits
        if fits:
            self.blocks[name] = held + missing
            self.held.setdefault(name, [])
        return fits

    def compute(
        self,
        counts: dict[str, int],
        window: int,
        *,
        again: bool = False,
        drafts: dict[str, DraftTree] | None = None,
    ) -> None:
        """Store new tokens (or the last ones again) and compare what every one of them sees.

        Behind them, the nodes of a draft see the whole text and their ancestors.
        """
        scheduled, tokens, seen = [], [], []
        for name, count in sorted(counts.items(), key=lambda item: item[1]):
            start = len(self.held[name]) - (count if again else 0)
            if not again:
                self.held[name] += (next(self.fresh) % len(LOOKS[0]) for _ in range(count))
            held, draft = self.held[name], (drafts or {}).get(name, EMPTY)
            tokens += [*held[start:], *draft.tokens]
            seen += [held[:end] for end in range(start + 1, len(held) + 1)]
            lines = [held]
            for token, parent in zip(draft.tokens, draft.parents, strict=True):
                lines.append([*lines[parent], token])
            seen += lines[1:]
            request = Request(request_id=name, prompt_tokens=(0,), noise_key=0)
            active = ActiveRequest(request=request, tokens=[], policy_version=0, num_computed=start)
            scheduled.append(Scheduled(active=active, num_tokens=count, draft=draft))
        batch = FlatBatch(
            tokens=torch.tensor(tokens),
            positions=torch.zeros(len(tokens), dtype=torch.int64),  # nothing is rotated here
            scheduled=scheduled,
            drawing=None,
        )
        attention = self.kv.attention(batch)
        for layer in range(LAYERS):
            parts = LOOKS[layer, tokens].split([HEADS, KV_HEADS, KV_HEADS], 1)
            for row, line in zip(attention.attend(layer, *parts, window), seen, strict=True):
                expected = seen_by_last(line, layer, window)
                torch.testing.assert_close(row, expected, rtol=0.0, atol=1e-12)

    @rule(num_tokens=st.integers(1, 30))
    def admit(self, num_tokens):
        self.grow(next(self.names), num_tokens)

    @precondition(lambda self: self.blocks)
    @rule(data=st.data(), window=st.sampled_from([0, 0, 3]))
    def append(self, data, window):
        counts = {}
        for name in data.draw(st.sets(st.sampled_from(sorted(self.blocks)), min_size=1)):
            count = data.draw(st.integers(1, 12))
            wanted = len(self.held[name]) + count
            if wanted <= self.MAX_LEN and self.grow(name, wanted):
                counts[name] = count
        if counts:
            self.compute(counts, window)

    @precondition(lambda self: self.blocks)
    @rule(data=st.data(), window=st.sampled_from([0, 0, 3]), seed=st.integers(0, 2**31))
    def verify(self, data, window, seed):
        """Drafts behind the next tokens of some; then a path of each stays, the rest is free."""
        rng, counts, drafts = random.Random(seed), {}, {}
        for name in sorted(data.draw(st.sets(st.sampled_from(sorted(self.blocks)), min_size=1))):
            count, size = rng.randint(1, 3), rng.randint(0, 9)
            wanted = len(self.held[name]) + count + size
            if wanted <= self.MAX_LEN and self.grow(name, wanted):
                parents = tuple(rng.randint(0, i) for i in range(size))
                if window and size:  # a draft is no deeper than its window
                    parents = tuple(0 if i >= window - 1 else p for i, p in enumerate(parents))
                    assert max(depths(parents)) < window
                new = tuple(next(self.fresh) % len(LOOKS[0]) for _ in range(size))
                counts[name] = count
                drafts[name] = DraftTree(tokens=new, parents=parents, margins=(0.0,) * size)
        if not counts:
            return
        self.compute(counts, window, drafts=drafts)
        paths = {}
        for name, draft in drafts.items():
            node, path = rng.randint(0, draft.size), []
            while node:
                path.insert(0, node)
                node = draft.parents[node - 1]
            text = self.held[name]
            paths[name] = len(text), path
            text += [draft.tokens[node - 1] for node in path]
            self.blocks[name] = blocks(len(text))
        self.kv.keep(paths)

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data())
    def share(self, data):
        source = data.draw(st.sampled_from(sorted(n for n, h in self.held.items() if h)))
        num_tokens = data.draw(st.integers(1, len(self.held[source])))
        target = next(self.names)
        wanted = num_tokens + data.draw(st.integers(0, 5))
        fits = blocks(wanted) <= self.num_free() and len(self.blocks) < self.ROWS
        assert fits == self.kv.try_share(source, target, num_shared=num_tokens, num_tokens=wanted)
        if fits:
            self.blocks[target] = blocks(wanted)
            self.held[target] = self.held[source][:num_tokens]

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data())
    def hand_over(self, data):
        source = data.draw(st.sampled_from(sorted(n for n, h in self.held.items() if h)))
        num_tokens = data.draw(st.integers(1, len(self.held[source])))
        target = next(self.names)
        self.kv.hand_over(source, target, num_tokens)
        del self.blocks[source]
        self.blocks[target] = blocks(num_tokens)
        self.held[target] = self.held.pop(source)[:num_tokens]

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def release(self, data):
        name = data.draw(st.sampled_from(sorted(self.blocks)))
        self.kv.release(name)
        del self.blocks[name], self.held[name]

    @invariant()
    def free_and_owned_are_the_total(self):
        usage = self.kv.usage()
        assert usage.free == BLOCK * self.num_free()
        assert usage.free + usage.owned == usage.total == self.TOTAL

    @rule(window=st.sampled_from([0, 3]))
    def everyone_reads_its_own(self, window=0):
        if counts := {name: 1 for name, held in self.held.items() if held}:
            self.compute(counts, window, again=True)

    def teardown(self):
        self.everyone_reads_its_own()
        for name in list(self.blocks):
            self.kv.release(name)
        assert self.kv.usage().free == self.TOTAL
