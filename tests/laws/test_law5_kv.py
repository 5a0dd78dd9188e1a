"""Law 5: KV is conserved, and everyone reads its own, after any sequence of operations."""

import functools
import itertools
import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from longtail.engine.batch import FlatBatch, Scheduled
from longtail.engine.engine import RolloutEngine
from longtail.engine.kv_cache import KVCache
from longtail.engine.request import ActiveRequest, EngineLimits
from longtail.engine.scheduler import Scheduler
from longtail.engine.speculation.speculator import Speculation
from longtail.generator import StepReport
from longtail.sampling import noise_key
from longtail.speculation.strategy import Strategy
from longtail.speculation.tree import EMPTY, DraftTree, depths
from longtail.types import Completion, Request
from support.drafters import WRONG, Script, ScriptedDrafter
from support.engine_requests import known_texts, request_of
from support.fakes import LedgerKV
from support.tiny_models import tiny_config, tiny_model

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


class SchedulerMachine(RuleBasedStateMachine):
    """The scheduler over a real cache; every step's arithmetic is played by writing down tokens."""

    MAX_LEN = 40

    def __init__(self) -> None:
        super().__init__()
        self.unfinished: dict[str, ActiveRequest] = {}
        self.goals: dict[str, int] = {}
        self.count = itertools.count()

    @initialize(
        max_running=st.integers(1, 5), spare=st.integers(0, 8), num_tokens=st.integers(10, 24)
    )
    def start(self, max_running, spare, num_tokens):
        self.budget, self.max_running = max_running + spare, max_running
        self.kv = LedgerKV(make_cache(num_tokens * BLOCK, max_running + 1, self.MAX_LEN))
        self.scheduler = Scheduler(self.kv, max_running=max_running, max_step_tokens=self.budget)

    @rule(
        prompt_len=st.integers(1, 25),
        num_new=st.integers(1, 15),
        num_samples=st.integers(1, 5),
        grouped=st.booleans(),
    )
    def add(self, prompt_len, num_new, num_samples, grouped):
        prompt = tuple(next(self.count) for _ in range(prompt_len))
        for _ in range(num_samples):
            name = f"r{next(self.count)}"
            group = f"g{prompt[0]}" if grouped else ""
            request = Request(request_id=name, prompt_tokens=prompt, noise_key=0, group_id=group)
            active = ActiveRequest(request=request, tokens=list(prompt), policy_version=0)
            self.unfinished[name], self.goals[name] = active, prompt_len + num_new
            self.scheduler.add(active)

    @rule(seed=st.integers(0, 2**31), share_drafted=st.sampled_from([0.0, 0.5, 1.0]))
    def step(self, seed=0, share_drafted=0.0):
        rng = random.Random(seed)
        before = list(self.scheduler.running.values())
        chosen = self.scheduler.schedule()
        assert bool(chosen) == bool(self.unfinished), "with work left there is a step"
        names = [each.active.request_id for each in chosen]
        assert len(set(names)) == len(names)
        assert set(names) <= self.scheduler.running.keys()
        assert sum(each.num_tokens for each in chosen) <= self.budget
        if before:
            assert before[0].request_id in names, "the oldest always gets on"
        for active in before:
            if active.num_pending == 1 and active.request_id in self.scheduler.running:
                assert active.request_id in names, "decoding never waits for prefill"
        sizes = [self.room_for_draft(each, rng, share_drafted) for each in chosen]
        for each, size in zip(chosen, sizes, strict=True):
            self.play(each, size, rng)

    def room_for_draft(self, each: Scheduled, rng: random.Random, share_drafted: float) -> int:
        """Draft as the engine does: for decoding requests, in blocks that none reserves."""
        size = rng.randint(1, 7) if rng.random() < share_drafted else 0
        decodes = each.draws and each.num_tokens == 1
        wanted = len(each.active.tokens) + size
        fits = decodes and wanted <= self.MAX_LEN
        return size if fits and self.kv.try_grow(each.active.request_id, wanted) else 0

    def play(self, each: Scheduled, size: int, rng: random.Random) -> None:
        """Do what the engine does with a scheduled request and the draft behind it."""
        active, num_tokens = each.active, each.num_tokens
        name, done = active.request_id, active.num_computed
        assert 1 <= num_tokens <= active.num_pending
        assert self.kv.held[name] == active.tokens[:done], "its KV is of its own tokens"
        self.kv.write(name, active.tokens[done : done + num_tokens])
        draws = each.draws
        active.num_computed += num_tokens
        drawn: list[int] = []
        if size:
            nodes = [next(self.count) for _ in range(size)]
            self.kv.write(name, nodes)
            path = sorted(rng.sample(range(1, size + 1), rng.randint(0, size)))
            self.kv.keep({name: (active.num_computed, path)})
            active.num_computed += len(path)
            drawn = [nodes[node - 1] for node in path]
        if draws:
            left = self.goals[name] - len(active.tokens)
            active.tokens += [*drawn, next(self.count)][:left]
            if len(active.tokens) == self.goals[name]:
                del self.unfinished[name]
                self.scheduler.finish(active)

    @precondition(lambda self: self.unfinished)
    @rule(data=st.data())
    def withdraw(self, data):
        name = data.draw(st.sampled_from(sorted(self.unfinished)))
        self.scheduler.withdraw(self.unfinished.pop(name))

    @invariant()
    def everyone_is_in_exactly_one_place(self):
        waiting = [active.request_id for active in self.scheduler.waiting]
        running = list(self.scheduler.running)
        assert sorted(waiting + running) == sorted(self.unfinished)
        assert len(running) <= self.max_running

    @invariant()
    def the_waiting_own_nothing_and_the_running_what_they_need(self):
        assert self.kv.room.keys() == self.scheduler.running.keys()
        assert all(active.num_computed == 0 for active in self.scheduler.waiting)
        for name, active in self.scheduler.running.items():
            assert self.kv.held[name] == active.tokens[: active.num_computed]
        usage = self.kv.usage()
        assert usage.owned == BLOCK * sum(map(blocks, self.kv.room.values()))
        assert usage.free + usage.owned == usage.total

    def teardown(self):
        # The oldest computes at least one of its tokens a step, keeps them, and leaves when done.
        for _ in range(sum(self.goals[name] for name in self.unfinished)):
            if self.unfinished:
                self.step()
        assert not self.unfinished, "everything ends"
        if self.goals:
            assert self.kv.usage().free == self.kv.usage().total


test_kv_is_conserved_and_read_by_its_owner = CacheMachine.TestCase
test_kv_is_conserved_and_read_by_its_owner.settings = settings(
    max_examples=20, stateful_step_count=30, deadline=None
)
test_the_scheduler_keeps_its_invariants_and_finishes = SchedulerMachine.TestCase
test_the_scheduler_keeps_its_invariants_and_finishes.settings = settings(
    max_examples=30, stateful_step_count=30, deadline=None
)


LIMITS = EngineLimits(max_running=8, max_step_tokens=60, max_len=64, kv_tokens=224)


@functools.cache
def write_under(script: Script | None) -> tuple[RolloutEngine, list[Completion], list[StepReport]]:
    """Twelve long texts in memory for seven blocks of 32, and what each step did."""
    requests = [
        request_of(
            f"r{i}",
            ((7 * i + 3 * j) % 128 for j in range(20 + i)),
            noise_key(6, i),
            str(i // 3),
            max_tokens=10 + 2 * i,
        )
        for i in range(12)
    ]
    engine = RolloutEngine(tiny_model(dtype=torch.float64), lambda tokens: "", LIMITS)
    if script is not None:
        drafter = ScriptedDrafter(known_texts(requests, write_under(None)[1]), script)
        engine.speculate(Speculation.fixed(drafter, Strategy(depth=4, width=2, size=7)))
    steps: list[StepReport] = []
    completions = engine.generate(requests, steps.append)
    usage = engine.kv_usage()
    assert usage.free == usage.total
    return engine, completions, steps


def course(steps: Sequence[StepReport]) -> list[tuple[int, int, tuple[str, ...]]]:
    """Return the numbers of running and extended texts and the finished ones of each step."""
    return [
        (step.num_running, len(step.emitted), tuple(done.request_id for done in step.finished))
        for step in steps
    ]


@pytest.mark.slow
def test_a_draft_takes_nothing_from_anybody():
    """With drafts that are all wrong every step is the plain one: the same requests get on, are

    preempted, admitted and done in it. Memory is short; drafts use free blocks only.
    """
    plain, texts, steps = write_under(None)
    drafted, same_texts, same_steps = write_under(WRONG)
    assert plain.scheduler.num_preemptions > 0
    assert [done.tokens for done in same_texts] == [done.tokens for done in texts]
    for name in ("num_preemptions", "num_shared_tokens"):
        assert getattr(drafted.scheduler, name) == getattr(plain.scheduler, name)
    assert course(same_steps) == course(steps)
    assert any(step.verified for step in same_steps)
