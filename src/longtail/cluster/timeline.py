"""The timeline of a step: the states of each worker as spans, and its metrics.

    worker 0   GGGGGGGGGGGGGGGGGGG . LLLLL          G generating   s spot      a learning ahead
    worker 1   GGGGGGGG . aaaassslll . LLL          . idle         l lending   L learning
               |      phase      |st |

A phase is a maximal interval in which a worker generates; a step with an evaluation has several.
Idle utilization is the share of other work in the time that workers do not generate in phases.
Stop latency (st) is the time with a worker in SPOT and none generating: the step waits for it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from longtail.cluster.workers.states import Mark, Span, State

Interval = tuple[float, float]
"""Begin and end, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The timeline of a step: each worker's spans are contiguous from `begin_s` to `end_s`."""

    spans: tuple[Span, ...]
    """Spans by worker, then by time; none is empty."""
    marks: tuple[Mark, ...]
    begin_s: float
    end_s: float

    def as_json(self) -> dict[str, Any]:
        """Return the timeline as JSON values; it begins at 0 s.

        Example: {"end_s": 3.0, "spans": [[0, "generating", 0.0, 3.0]], "marks": [[0, 2.5, "..."]]}
        """
        spans = [
            [each.worker, each.state.value, each.begin_s - self.begin_s, each.end_s - self.begin_s]
            for each in self.spans
        ]
        marks = [[each.worker, each.at_s - self.begin_s, each.name] for each in self.marks]
        return {"end_s": self.end_s - self.begin_s, "spans": spans, "marks": marks}

    @property
    def workers(self) -> list[int]:
        """Workers in ascending order."""
        return sorted({span.worker for span in self.spans})

    def seconds(self) -> dict[int, dict[State, float]]:
        """Return the seconds that each worker spent in each state."""
        totals = {worker: dict.fromkeys(State, 0.0) for worker in self.workers}
        for span in self.spans:
            totals[span.worker][span.state] += span.seconds
        return totals

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the step (docs/metrics.md)."""
        totals = self.seconds().values()
        works = (State.SPOT, State.AHEAD, State.LENDING)
        named = (State.GENERATING, State.IDLE, *works, State.LEARNING)
        sums = {state: sum((each[state] for each in totals), 0.0) for state in named}
        phases = _joined(self._in_state(State.GENERATING))
        used = sum(self._overlap(state, phases) for state in works)
        idle = self._overlap(State.IDLE, phases)
        generating_or_spot = _joined([*phases, *self._in_state(State.SPOT)])
        spot_stop_latency_s = max(_length(generating_or_spot) - _length(phases), 0.0)
        step_s = self.end_s - self.begin_s
        return {f"cluster/{state.value}_s": seconds for state, seconds in sums.items()} | {
            "cluster/idle_utilization": used / (used + idle) if used + idle else 0.0,
            "cluster/spot_stop_latency_s": spot_stop_latency_s,
            "cluster/spot_stop_latency_share": spot_stop_latency_s / step_s if step_s else 0.0,
        }

    def _in_state(self, state: State) -> list[Interval]:
        return [(span.begin_s, span.end_s) for span in self.spans if span.state is state]

    def _overlap(self, state: State, phases: Sequence[Interval]) -> float:
        """Sum the seconds that all workers were in a state during phases."""
        overlaps = (
            max(min(end, last) - max(begin, first), 0.0)
            for begin, end in self._in_state(state)
            for first, last in phases
        )
        return sum(overlaps, 0.0)


def _joined(intervals: Iterable[Interval]) -> list[Interval]:
    """Join intervals that touch or overlap: (0, 2), (1, 3), (3, 4), (6, 7) -> (0, 4), (6, 7)."""
    joined: list[Interval] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def _length(intervals: Iterable[Interval]) -> float:
    return sum((end - begin for begin, end in intervals), 0.0)
