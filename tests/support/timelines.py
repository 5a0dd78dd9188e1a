"""Timelines drawn as pictures."""

from itertools import groupby

from longtail.cluster.workers.states import Mark, Span, State, Timeline

LETTERS = {
    "+": State.STARTING, "G": State.GENERATING, ".": State.IDLE, "s": State.SPOT,
    "a": State.AHEAD, "L": State.LEARNING, "x": State.DEAD, "o": State.ABSENT,
}  # fmt: skip


def drawn(*workers: str, begin_s: float = 0.0, marks: tuple[Mark, ...] = ()) -> Timeline:
    """Return the timeline of a picture: one line per worker, one letter per second."""
    spans = []
    for worker, letters in enumerate(workers):
        at = begin_s
        for letter, same in groupby(letters):
            end = at + len(list(same))
            spans.append(Span(worker=worker, state=LETTERS[letter], begin_s=at, end_s=end))
            at = end
    return Timeline(
        spans=tuple(spans), marks=marks, begin_s=begin_s, end_s=begin_s + len(workers[0])
    )
