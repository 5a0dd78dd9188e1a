"""Law 5: KV is conserved, and everyone reads its own, after any sequence of operations."""

import itertools

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fakes import LedgerKV
from longtail.engine.batch import FlatBatch, Segment
from longtail.engine.kv_cache import ContiguousKVCache
from longtail.engine.request import ActiveRequest
from longtail.engine.scheduler import Scheduler
from longtail.types import Request
from tiny_models import tiny_config

CPU = torch.device("cpu")
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


def make_cache(num_tokens: int, max_rows: int, max_len: int) -> ContiguousKVCache:
    return ContiguousKVCache(
        CONFIG,
        num_tokens=num_tokens,
        max_rows=max_rows,
        max_len=max_len,
        dtype=torch.float64,
        device=CPU,
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
    """The contiguous cache against a dict of token lists."""

    TOTAL, ROWS, MAX_LEN = 80, 4, 60

    def __init__(self) -> None:
        super().__init__()
        self.kv = make_cache(self.TOTAL, self.ROWS, self.MAX_LEN)
        self.blocks: dict[str, int] = {}
        self.held: dict[str, list[int]] = {}
        self.names = (f"r{i}" for i in itertools.count())
        self.fresh = itertools.count()

    def grow(self, name: str, num_tokens: int) -> bool:
        """Ask for room; the model knows what the answer must be."""
        missing = max(0, blocks(num_tokens) - self.blocks.get(name, 0))
        free = self.TOTAL // BLOCK - sum(self.blocks.values())
        fits = missing <= free and (name in self.blocks or len(self.blocks) < self.ROWS)
        assert self.kv.try_grow(name, num_tokens) == fits
        if fits:
            self.blocks[name] = self.blocks.get(name, 0) + missing
            self.held.setdefault(name, [])
        return fits

    def compute(self, counts: dict[str, int], window: int, *, again: bool = False) -> None:
        """Store new tokens (or the last ones again) and compare what every one of them sees."""
        segments, tokens = [], []
        for name, count in sorted(counts.items(), key=lambda item: item[1]):
            start = len(self.held[name]) - (count if again else 0)
            if not again:
                self.held[name] += (next(self.fresh) % len(LOOKS[0]) for _ in range(count))
            tokens += self.held[name][start:]
            segments.append(Segment(request_id=name, num_context=start, num_tokens=count))
        batch = FlatBatch(
            tokens=torch.tensor(tokens),
            positions=torch.cat(
                [torch.arange(s.num_context, s.num_context + s.num_tokens) for s in segments]
            ),
            segments=tuple(segments),
            drawing=None,
        )
        attention = self.kv.attention(batch)
        for layer in range(LAYERS):
            parts = LOOKS[layer, tokens].split([HEADS, KV_HEADS, KV_HEADS], 1)
            rows = iter(attention.attend(layer, *parts, window))
            for segment in segments:
                for end in range(
                    segment.num_context + 1, segment.num_context + 1 + segment.num_tokens
                ):
                    expected = seen_by_last(self.held[segment.request_id][:end], layer, window)
                    torch.testing.assert_close(next(rows), expected, rtol=0.0, atol=1e-12)

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

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data())
    def share(self, data):
        source = data.draw(st.sampled_from(sorted(n for n, h in self.held.items() if h)))
        num_tokens = data.draw(st.integers(1, len(self.held[source])))
        target = next(self.names)
        if self.grow(target, num_tokens + data.draw(st.integers(0, 5))):
            self.kv.share(source, target, num_tokens)
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
        assert usage.owned == BLOCK * sum(self.blocks.values())
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

    @rule()
    def step(self):
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
        for each in chosen:
            self.play(each.active, each.num_tokens)

    def play(self, active: ActiveRequest, num_tokens: int) -> None:
        """Do what the engine does with a scheduled request."""
        name, done = active.request_id, active.num_computed
        assert 1 <= num_tokens <= active.num_pending
        assert self.kv.held[name] == active.tokens[:done], "its KV is of its own tokens"
        self.kv.write(name, active.tokens[done : done + num_tokens])
        draws = num_tokens == active.num_pending
        active.num_computed += num_tokens
        if draws:
            active.tokens.append(next(self.count))
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
    max_examples=40, stateful_step_count=30, deadline=None
)
test_the_scheduler_keeps_its_invariants_and_finishes = SchedulerMachine.TestCase
test_the_scheduler_keeps_its_invariants_and_finishes.settings = settings(
    max_examples=50, stateful_step_count=30, deadline=None
)
