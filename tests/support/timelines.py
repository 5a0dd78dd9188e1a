"""Timelines drawn as pictures."""

from itertools import groupby

from longtail.cluster.states import State, StateChange, StateInterval
from longtail.cluster.timeline import Mark, Timeline

LETTERS = {
    "+": State.STARTING, "G": State.GENERATING, ".": State.IDLE, "s": State.SPOT,
    "L": State.LEARNING, "x": State.DEAD,
}  # fmt: skip


def drawn(*workers: str, begin_s: float = 0.0, marks: tuple[Mark, ...] = ()) -> Timeline:
    """Return the timeline of a picture: one line per worker, one letter per second."""
    changes = []
    for worker, letters in enumerate(workers):
        at = begin_s
        for letter, same in groupby(letters):
            changes.append(StateChange(worker=worker, state=LETTERS[letter], at=at))
            at += len(list(same))
    interval = StateInterval(
        begin_s=begin_s,
        end_s=begin_s + len(workers[0]),
        states=(State.IDLE,) * len(workers),
        changes=tuple(sorted(changes, key=lambda change: change.at)),
    )
    return Timeline.of(interval, marks)
