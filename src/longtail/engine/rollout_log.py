"""The log of a rollout, step by step: one line of JSON per rollout.

speculation.jsonl has a line for every rollout, in order; an evaluation belongs to the step after
it.

    {"step": 3, "kind": "training", "worker": 0, "seconds": [0.004, 0.007],
     "running": [64, 64], "drafts": [0, 64], "nodes": [0, 190], "accepted": [0, 121],
     "switches": [[1, true, "predicted 1.21x of plain decoding at 64 running"]]}
"""

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, final

from longtail.generator import StepReport, Switch

FILE = "speculation.jsonl"
_MICROSECONDS = 6
TRAINING, EVALUATION = "training", "evaluation"


@final
@dataclass(slots=True, kw_only=True)
class RolloutSeries:
    """A rollout in columns with one entry per engine step, of steps that speculate.

    `add` runs in the engine's hot loop: it only appends.
    """

    seconds: list[float] = field(default_factory=list)
    """Engine seconds of each step."""
    running: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    """Number of verified drafts; 0 in a plain step."""
    nodes: list[int] = field(default_factory=list)
    """Number of nodes of those drafts."""
    accepted: list[int] = field(default_factory=list)
    switches: list[tuple[int, Switch]] = field(default_factory=list)
    """Step indices at which the engine starts or stops drafting."""

    def add(self, step: StepReport) -> None:
        """Add a step; steps without speculation are skipped."""
        if not step.speculates:
            return
        if step.switch is not None:
            self.switches.append((len(self.seconds), step.switch))
        self.seconds.append(step.step_s)
        self.running.append(step.num_running)
        self.drafts.append(len(step.verified))
        self.nodes.append(sum(each.num_drafted for each in step.verified))
        self.accepted.append(sum(each.num_accepted for each in step.verified))

    @property
    def mean_nodes(self) -> float:
        """Mean number of verified nodes per step."""
        return sum(self.nodes) / max(len(self.seconds), 1)

    def line(self, kind: str, worker: int) -> dict[str, Any]:
        """Return the line of the log, without its step.

        Its seconds are from the start of the rollout to the end of each step, to the microsecond.
        The slowest worker's line of a training step comes last and is read.
        """
        return {
            "kind": kind,
            "worker": worker,
            "seconds": [round(second, _MICROSECONDS) for second in accumulate(self.seconds)],
            "running": self.running,
            "drafts": self.drafts,
            "nodes": self.nodes,
            "accepted": self.accepted,
            "switches": [[index, each.drafts, each.reason] for index, each in self.switches],
        }
