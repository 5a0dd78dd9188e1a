"""The drafter's buffer: eviction, draws, held-out texts and bounds."""

from collections import Counter
from collections.abc import Sequence
from copy import deepcopy

from hypothesis import given, settings
from hypothesis import strategies as st

from longtail.drafter.training.buffer import DrafterBuffer, SequenceSnapshot
from longtail.rl.data.examples import Example

PROMPT_LEN = 4
FAR = 1000
"""Token i of text n is n * FAR + i, so a token identifies its text and position."""


def _snapshot(
    number: int,
    length: int,
    *,
    step: int = 0,
    name: str | None = None,
    prompt_len: int = PROMPT_LEN,
) -> SequenceSnapshot:
    return SequenceSnapshot(
        request_id=name or f"train/{number}@0#0",
        tokens=tuple(range(number * FAR, number * FAR + length)),
        prompt_len=prompt_len,
        step=step,
    )


def _buffer(texts: Sequence[SequenceSnapshot] = (), *, max_bytes: int = 10**6, seed: int = 1):
    buffer = DrafterBuffer(max_bytes, seed=seed)
    buffer.add(texts)
    return buffer


def _numbers(examples: Sequence[Example]) -> list[int]:
    return [example.tokens[0] // FAR for example in examples]


def _held() -> list[int]:
    """Return the numbers under 100 of held-out texts."""
    return sorted(_numbers(_buffer([_snapshot(n, 9) for n in range(100)]).heldout(10**6)))


def _learned(count: int) -> list[int]:
    """Return the first numbers of texts that are not held out."""
    held = _held()
    return [n for n in range(100) if n not in held][:count]


def _draws_of_a_pass(buffer: DrafterBuffer) -> set[int]:
    """Return the draws of a whole pass of a copy."""
    return set(_numbers(deepcopy(buffer).batch(10**6)))


def test_a_longer_version_of_a_text_replaces_a_shorter_one() -> None:
    number = _learned(1)[0]
    buffer = _buffer([_snapshot(number, length) for length in (9, 14, 11)])  # the last is late
    assert buffer.num_sequences == 1
    assert buffer.batch(100)[0].tokens == _snapshot(number, 14).tokens


def test_long_texts_of_the_previous_step_stay_for_one_step() -> None:
    numbers = _learned(9)
    buffer = _buffer([_snapshot(n, 10 + i) for i, n in enumerate(numbers[:5])])
    buffer.begin(1)
    assert _draws_of_a_pass(buffer) == set(numbers[2:5])  # the median text is one of them
    buffer.add([_snapshot(n, 20 + i, step=1) for i, n in enumerate(numbers[5:])])
    assert _draws_of_a_pass(buffer) == set(numbers[2:])
    buffer.begin(1)  # it has begun
    assert _draws_of_a_pass(buffer) == set(numbers[2:])
    buffer.begin(2)
    assert _draws_of_a_pass(buffer) == set(numbers[7:])


def test_texts_of_a_later_step_begin_it_and_those_of_an_earlier_step_only_grow() -> None:
    numbers = _learned(4)
    buffer = _buffer([_snapshot(n, 10 + i) for i, n in enumerate(numbers[:2])])
    buffer.add([_snapshot(numbers[2], 10, step=1)])
    late = [_snapshot(numbers[0], 40), _snapshot(numbers[1], 40), _snapshot(numbers[3], 40)]
    buffer.add(late)
    assert _draws_of_a_pass(buffer) == {numbers[1], numbers[2]}
    assert sorted(len(text.tokens) for text in buffer.snapshots()) == [10, 40]


def test_siblings_are_held_out_together_in_every_buffer() -> None:
    names = [f"train/{n}@0#{sample}" for n in range(200) for sample in range(3)]
    texts = [_snapshot(i, 9, name=name) for i, name in enumerate(names)]
    sides = []
    for seed in (1, 2):
        held = _numbers(_buffer(texts, seed=seed).heldout(10**6))
        sides.append({names[i] for i in held})
        groups = Counter(name.rpartition("#")[0] for name in sides[-1])
        assert set(groups.values()) == {3}
        # 200 groups, one in 8: outside of 25 +- 5 standard deviations with probability 6e-7
        assert 2 <= len(groups) <= 48
    assert sides[0] == sides[1]


def test_held_out_texts_come_newest_first_up_to_a_limit_of_tokens() -> None:
    held = _held()[:4]
    buffer = _buffer([_snapshot(held[0], 20)])
    buffer.add([_snapshot(n, 20, step=1) for n in held[1:]])
    buffer.add([_snapshot(held[1], 25, step=1)])  # it grew: newer than the others
    assert _numbers(buffer.heldout(1000)) == [held[1], held[3], held[2], held[0]]
    assert _numbers(buffer.heldout(64)) == [held[1], held[3]]
    (end,) = buffer.heldout(10)  # the end of a long text
    assert end.tokens == _snapshot(held[1], 25).tokens[-10:]
    assert end.prompt_len == 2
    assert [len(text.tokens) for text in buffer.heldout(1000, max_len=10)] == [10] * 4


def test_a_pass_draws_every_text_once_and_a_batch_holds_none_twice() -> None:
    numbers = _learned(23)
    buffer = _buffer([_snapshot(n, 9 + n % 7) for n in numbers])
    drawn: list[int] = []
    while len(drawn) < 5 * len(numbers):
        batch = buffer.batch(60)
        assert 0 < sum(len(text.tokens) for text in batch) <= 60
        assert len(set(_numbers(batch))) == len(batch)
        drawn += _numbers(batch)
    passes = [drawn[i : i + 23] for i in range(0, 23 * 4, 23)]
    assert all(set(one) == set(numbers) for one in passes)
    assert len({tuple(one) for one in passes}) == 4  # each pass has its own order


def test_preferred_texts_come_first_in_each_pass_and_in_a_measurement() -> None:
    numbers, held = _learned(23), _held()[:4]
    liked = {*numbers[3:17:2], held[0], held[2]}
    buffer = _buffer([_snapshot(n, 9) for n in (*numbers, *held)])
    buffer.prefer(lambda tokens: tokens[0] // FAR in liked)
    first = liked & set(numbers)
    for _ in range(3):
        drawn = [_numbers(buffer.batch(9))[0] for _ in numbers]
        assert set(drawn) == set(numbers)
        assert set(drawn[: len(first)]) == first
    assert set(_numbers(buffer.heldout(18))) == {held[0], held[2]}
    buffer.prefer(lambda tokens: tokens[0] // FAR not in liked)
    assert set(_numbers(buffer.heldout(18))) == {held[1], held[3]}


def test_the_bytes_are_bounded_and_the_oldest_steps_shortest_texts_are_dropped_first() -> None:
    numbers = _learned(8)
    room = _buffer([_snapshot(n, 30) for n in numbers[:4]]).num_bytes
    buffer = _buffer([_snapshot(n, 20 + i) for i, n in enumerate(numbers[:3])], max_bytes=room)
    buffer.begin(1)
    assert _draws_of_a_pass(buffer) == set(numbers[1:3])
    buffer.add([_snapshot(n, 30, step=1) for n in numbers[3:6]])
    assert _draws_of_a_pass(buffer) == set(numbers[2:6])
    buffer.add([_snapshot(numbers[6], 34, step=1), _snapshot(numbers[7], 29, step=1)])
    assert _draws_of_a_pass(buffer) == set(numbers[4:7])
    buffer.add([_snapshot(numbers[0], room, step=1)])  # too long for the whole buffer
    assert _draws_of_a_pass(buffer) == set(numbers[4:7])


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(1, 60), st.integers(0, 2)), max_size=40),
    st.integers(0, 2000),
)
def test_bounds_and_counts_hold_for_any_sequences(arrivals, max_bytes) -> None:
    buffer = _buffer(max_bytes=max_bytes)
    for number, length, step in arrivals:
        buffer.add([_snapshot(number, length, step=step)])
        assert buffer.num_bytes <= max_bytes
        num_tokens = sum(len(text.tokens) for text in buffer.snapshots())
        assert buffer.num_bytes == 4 * num_tokens + 256 * buffer.num_sequences
        for text in (*buffer.batch(30), *buffer.heldout(30)):
            assert 1 <= text.prompt_len < len(text.tokens) <= 30
            assert text.tokens == text.sequence.tokens[text.start : text.start + len(text.tokens)]
            assert text.start + text.prompt_len >= PROMPT_LEN, "no token of the prompt is trained"
