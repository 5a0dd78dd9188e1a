"""Sharing: which requests move to another worker, so that a step ends sooner.

A text does not depend on its worker, so a running request may move; the other worker first reads
what is written. Two moves are weighed, and the one is made that gains most, if any does:

    spread   half of the busiest worker's texts go to an idle one   all are written sooner
    gather   all texts of one worker go to another                  it learns from finished groups

In the tail a core waits for memory: six texts take hardly longer than three, so that a worker
gathers them nearly for free. A step ends when all texts are written and learned from:

    end = T + (learning - what idle workers learn until T) / workers,      T = longest worker
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from longtail.cluster.forecast import RolloutForecast, Text

_LEAST_GAIN_S = 0.2
"""Least predicted gain of a move: messages and the last step of the old worker take as long."""
_LEAST_SHARE = 0.05
"""Least predicted gain, as a share of the rest of the step: forecasts are no better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Requests that move from one worker to another.

    Example: Move(source=0, target=1, names=("p/3@0#1",), gain_s=0.8)
    """

    source: int
    target: int
    names: tuple[str, ...]
    gain_s: float
    """Predicted seconds by which the step ends sooner."""


def best_move(
    loads: Mapping[int, Sequence[Text]],
    idle: Sequence[int],
    early_s: float,
    forecast: RolloutForecast,
) -> Move | None:
    """Return the move after which the step ends soonest; None if none gains enough.

    `loads` are the unfinished texts of each generating worker; `idle` are workers without texts
    that could take some. `early_s` are the seconds of learning, by one worker, that can be done
    before the last text is written.
    """
    if not forecast.times.is_known or not loads:
        return None
    num_workers = len(loads) + len(idle)
    seconds = {worker: forecast.worker_s(texts) for worker, texts in loads.items()}
    now_s = _end_s(seconds, early_s, num_workers)
    moves = [
        Move(
            source=source,
            target=target,
            names=tuple(each.request.request_id for each in moved),
            gain_s=now_s - _end_s(seconds | changed, early_s, num_workers),
        )
        for source, target, moved, changed in (
            *_spreads(loads, idle, seconds, forecast),
            *_gatherings(loads, seconds, forecast),
        )
    ]
    best = max(moves, key=lambda move: move.gain_s, default=None)
    enough = max(_LEAST_GAIN_S, _LEAST_SHARE * now_s)
    return best if best is not None and best.gain_s > enough else None


def _end_s(seconds: Mapping[int, float], early_s: float, num_workers: int) -> float:
    """Return the end of the step, but for the learning that no worker can do before."""
    longest_s = max(seconds.values(), default=0.0)
    idle_s = num_workers * longest_s - sum(seconds.values())
    return longest_s - min(early_s, idle_s) / num_workers


_Change = tuple[int, int, Sequence[Text], dict[int, float]]
"""Source, target, texts that move, and the seconds of both workers after it."""


def _spreads(
    loads: Mapping[int, Sequence[Text]],
    idle: Sequence[int],
    seconds: Mapping[int, float],
    forecast: RolloutForecast,
) -> list[_Change]:
    """Divide the texts of the worker that ends last with an idle one."""
    source = max(seconds, key=lambda worker: seconds[worker])
    if not idle or len(loads[source]) < 2:
        return []
    stays, moves = list[Text](), list[Text]()
    for text in sorted(loads[source], key=lambda each: -each.left):
        (stays if len(stays) <= len(moves) else moves).append(text)
    changed = {
        source: forecast.worker_s(stays),
        idle[0]: forecast.worker_s(moves) + _reading_s(moves, forecast),
    }
    return [(source, idle[0], moves, changed)]


def _gatherings(
    loads: Mapping[int, Sequence[Text]],
    seconds: Mapping[int, float],
    forecast: RolloutForecast,
) -> list[_Change]:
    """Free the worker with the least left, for learning; another one writes its texts."""
    if len(loads) < 2:
        return []
    source, target, *_ = sorted(seconds, key=lambda worker: seconds[worker])
    moves = loads[source]
    both = [*loads[target], *moves]
    if len(both) > forecast.max_running:
        return []
    changed = {source: 0.0, target: forecast.worker_s(both) + _reading_s(moves, forecast)}
    return [(source, target, moves, changed)]


def _reading_s(texts: Sequence[Text], forecast: RolloutForecast) -> float:
    begun = [each.num_known for each in texts if each.written]
    return forecast.times.reading_s(sum(begun)) if begun else 0.0
