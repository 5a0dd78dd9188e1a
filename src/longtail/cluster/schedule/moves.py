"""Sharing: which requests move to another worker, so that a step ends sooner.

A text does not depend on its worker, so a running request may move; the other worker first reads
what is written. Moves are weighed, and the one is made that gains most, if any does:

    spread   texts of the busiest worker go to an idle one   all are written sooner
    gather   all texts of one worker go to another           it learns from finished groups,
                                                             or the other one is faster

In the tail a core waits for memory: six texts take hardly longer than three, so that a worker
gathers them nearly for free. A step ends when all texts are written and learned from:

    end = T + (learning - what idle workers learn until T) / workers,      T = longest worker
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from longtail.cluster.schedule.forecast import Forecaster, Unfinished

_LEAST_GAIN_S = 0.2
"""Least predicted gain of a move: messages and the last step of the old worker take as long."""
_LEAST_SHARE = 0.05
"""Least predicted gain, as a fraction of the rest of the step: the error of forecasts."""

_SOON = 0.5
"""Fraction of the longest rest: groups finished by then are learned from before its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Requests that move from one worker to another."""

    source: int
    target: int
    names: tuple[str, ...]
    gain_s: float
    """Predicted seconds by which the step ends sooner."""


def best_move(
    loads: Mapping[int, Sequence[Unfinished]],
    idle: Sequence[int],
    early_s: float,
    forecast: Forecaster,
) -> Move | None:
    """Return the move after which the step ends soonest; None if none gains enough.

    `loads` are the unfinished texts of each generating worker; `idle` are workers without texts
    that could take some, the one that would get them first. `early_s` are the seconds of learning,
    by one worker, that can be done before the last text is written.
    """
    if not forecast.times.is_known or not loads:
        return None
    num_workers = len(loads) + len(idle)
    seconds = {worker: forecast.worker_s(worker, texts) for worker, texts in loads.items()}
    now_s = _end_s(seconds, early_s, num_workers)
    moves = []
    for source, target, moved in _candidates(loads, idle, seconds, forecast):
        names = tuple(each.request.request_id for each in moved)
        gone = set(names)
        stays = [each for each in loads[source] if each.request.request_id not in gone]
        both = [*loads.get(target, ()), *moved]
        changed = {
            source: forecast.worker_s(source, stays),
            target: forecast.worker_s(target, both) + forecast.reading_s(target, moved),
        }
        gain_s = now_s - _end_s(seconds | changed, early_s, num_workers)
        moves.append(Move(source=source, target=target, names=names, gain_s=gain_s))
    best = max(moves, key=lambda move: move.gain_s, default=None)
    enough = max(_LEAST_GAIN_S, _LEAST_SHARE * now_s)
    return best if best is not None and best.gain_s > enough else None


def finished_soon(loads: Mapping[int, Sequence[Unfinished]]) -> int:
    """Return the tokens of the groups that can be learned from before the last one is finished."""
    lefts: dict[str, float] = {}
    written: dict[str, int] = {}
    for each in (each for own in loads.values() for each in own):
        group = each.request.group_id
        lefts[group] = max(lefts.get(group, 0.0), each.left)
        written[group] = written.get(group, 0) + round(each.written + each.left)
    longest = max(lefts.values(), default=0.0)
    return sum(written[group] for group, left in lefts.items() if left < _SOON * longest)


def _end_s(seconds: Mapping[int, float], early_s: float, num_workers: int) -> float:
    """Return the end of the step, but for the learning that no worker can do before."""
    longest_s = max(seconds.values(), default=0.0)
    idle_s = num_workers * longest_s - sum(seconds.values())
    return longest_s - min(early_s, idle_s) / num_workers


def _candidates(
    loads: Mapping[int, Sequence[Unfinished]],
    idle: Sequence[int],
    seconds: Mapping[int, float],
    forecast: Forecaster,
) -> Iterator[tuple[int, int, Sequence[Unfinished]]]:
    """Yield source, target and texts of each move that may gain."""
    ranked, speed_of = sorted(seconds, key=lambda worker: seconds[worker]), forecast.speeds.of
    *others, last = ranked
    moves, num_kept = list[Unfinished](), 0  # an idle one takes some of the last one's, by speed
    for each in sorted(loads[last], key=lambda each: -each.left) if idle else ():
        if (num_kept + 1) / speed_of(last) <= (len(moves) + 1) / speed_of(idle[0]):
            num_kept += 1
        else:
            moves.append(each)
    if moves:
        yield last, idle[0], moves
    pairs = [(ranked[0], ranked[1])] if others else []  # free the one with the least left
    fastest = max((*idle[:1], *others), key=speed_of, default=last)
    if speed_of(fastest) > speed_of(last):  # relieve the last one
        pairs.append((last, fastest))
    for source, target in pairs:
        if len(loads[source]) + len(loads.get(target, ())) <= forecast.max_running:
            yield source, target, loads[source]
