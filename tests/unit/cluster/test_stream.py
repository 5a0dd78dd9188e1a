"""The texts sent to a worker: each once, then its longer versions, all of them to a new worker."""

from longtail.cluster.drafter.idle import TextStream
from longtail.drafter.training.buffer import DrafterBuffer, TextSnapshot


def written(name: str, length: int, *, step: int = 1, is_finished: bool = False) -> TextSnapshot:
    return TextSnapshot(
        request_id=name,
        tokens=tuple(range(2 + length)),
        prompt_len=2,
        step=step,
        is_finished=is_finished,
    )


def stream(step: int = 1, buffer: DrafterBuffer | None = None) -> TextStream:
    return TextStream(DrafterBuffer(10**6, seed=0) if buffer is None else buffer, step)


def test_a_text_is_sent_once_and_then_only_its_longer_versions():
    texts = stream()
    texts.add([written("a", 3), written("b", 2)])
    assert texts.unsent(7) == [written("a", 3), written("b", 2)]
    texts.mark_sent(7)
    texts.add([written("a", 3), written("b", 4), written("b", 1)])
    assert texts.unsent(7) == [written("b", 4)]
    texts.mark_sent(7)
    texts.add([written("b", 4, is_finished=True), written("a", 3)])
    assert texts.unsent(7) == [written("b", 4, is_finished=True)]
    texts.mark_sent(7)
    texts.add([written("b", 4)])
    assert texts.unsent(7) == []


def test_a_late_or_new_worker_is_sent_only_the_longest_version():
    texts = stream()
    for length in (1, 2, 3):
        texts.add([written("a", length)])
        texts.mark_sent(7)
    assert texts.unsent(8) == [written("a", 3)]
    texts.forget(7)
    assert texts.unsent(7) == [written("a", 3)]


def test_a_text_stays_unsent_until_it_is_marked_as_sent():
    texts = stream()
    texts.add([written("a", 1)])
    assert texts.unsent(7) == texts.unsent(7) == [written("a", 1)]


def test_a_text_without_a_generated_token_is_ignored():
    texts = stream()
    texts.add([written("a", 0)])
    assert not texts.has_texts
    assert texts.unsent(7) == []


def test_texts_kept_by_the_buffer_are_sent_first():
    buffer = DrafterBuffer(10**6, seed=0)
    buffer.add(written(f"{index}", index, is_finished=True) for index in range(1, 6))
    texts = stream(2, buffer)
    kept = buffer.snapshots()
    assert kept, "the long ones of the step before"
    assert texts.unsent(7) == kept
    texts.add([written("a", 9, step=2)])
    assert texts.unsent(7) == [*kept, written("a", 9, step=2)]
    assert buffer.snapshots() == texts.unsent(7)


def test_texts_of_a_restored_buffer_are_sent_in_the_order_of_their_steps():
    buffer = DrafterBuffer(10**6, seed=0)
    buffer.add([written("a", 5), written("b", 5)])
    buffer.add([written("c", 1, step=2), written("b", 6), written("a", 6)])
    again = DrafterBuffer(10**6, seed=0)
    again.restore(buffer.tensors(), buffer.state())
    assert [each.request_id for each in again.snapshots()] == ["b", "a", "c"]
    other = DrafterBuffer(10**6, seed=0)
    other.add(stream(2, again).unsent(0))
    assert other.snapshots() == buffer.snapshots()
