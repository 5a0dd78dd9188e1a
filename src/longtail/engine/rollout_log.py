"""The log of a rollout, step by step: one line of JSON per rollout.

speculation.jsonl has a line for every rollout, in order; an evaluation belongs to the step after
it.

    {"step": 3, "kind": "training", "worker": 0, "seconds": [0.004, 0.007],
     "running": [64, 64], "drafts": [0, 64], "nodes": [0, 190], "accepted": [0, 121],
     "switches": [[1, true, "predicted 1.21x of plain decoding at 64 running"]]}
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any, final

from longtail.generator import StepReport, Switch

FILE = "speculation.jsonl"
_MICROSECONDS = 6
TRAINING, EVALUATION = "training", "evaluation"


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSeries:
    """A rollout in columns with one entry per engine step."""

    seconds: tuple[float, ...]
    """Engine seconds from the start of the rollout to the end of each step, to the microsecond."""
    running: tuple[int, ...]
    drafts: tuple[int, ...]
    """Number of verified drafts; 0 in a plain step."""
    nodes: tuple[int, ...]
    """Number of nodes of those drafts."""
    accepted: tuple[int, ...]
    switches: tuple[tuple[int, Switch], ...]
    """Step indices at which the engine starts or stops drafting."""

    @property
    def mean_nodes(self) -> float:
        """Mean number of verified nodes per step."""
        return sum(self.nodes) / max(len(self.seconds), 1)

    def line(self, kind: str, worker: int) -> dict[str, Any]:
        """Return the line of the log, without its step.

        The slowest worker's line of a training step comes last and is read.
        """
        columns = ("seconds", "running", "drafts", "nodes", "accepted")
        return {
            "kind": kind,
            "worker": worker,
            **{name: list(getattr(self, name)) for name in columns},
            "switches": [[index, each.drafts, each.reason] for index, each in self.switches],
        }


@final
class RolloutLog:
    """Collects one rollout. `add` runs in the engine's hot loop: it only appends."""

    def __init__(self) -> None:
        self._seconds: list[float] = []
        self._counts: list[tuple[int, int, int, int]] = []
        self._switches: list[tuple[int, Switch]] = []

    def add(self, step: StepReport) -> None:
        """Add a step; steps without speculation are skipped."""
        if not step.speculates:
            return
        if step.switch is not None:
            self._switches.append((len(self._seconds), step.switch))
        nodes = accepted = 0
        for each in step.verified:
            nodes += each.num_drafted
            accepted += each.num_accepted
        self._seconds.append(step.step_s)
        self._counts.append((step.num_running, len(step.verified), nodes, accepted))

    def series(self) -> RolloutSeries | None:
        """Return the series; None if the engine does not speculate."""
        if not self._seconds:
            return None
        running, drafts, nodes, accepted = zip(*self._counts, strict=True)
        return RolloutSeries(
            seconds=tuple(round(second, _MICROSECONDS) for second in accumulate(self._seconds)),
            running=running,
            drafts=drafts,
            nodes=nodes,
            accepted=accepted,
            switches=tuple(self._switches),
        )
