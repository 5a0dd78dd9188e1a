"""Options of `longtail bench learner` and `longtail bench drafter`."""

from dataclasses import dataclass
from typing import Annotated, Literal

from longtail.bench.common.options import Json, Option


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerBenchOptions:
    """Sequences of a step, and how they are cut into micro-batches."""

    threads: Annotated[int, Option("compute threads")] = 1
    repeats: Annotated[int, Option("measured rounds", low=1)] = 5
    sequences: Annotated[int, Option("sequences of a step", low=1)] = 32
    rows: Annotated[int, Option("sequences of a micro-batch", low=1)] = 8
    budget: Annotated[int, Option("tokens of a micro-batch under a token budget", low=1)] = 4096
    json_only: Json = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterBenchOptions(LearnerBenchOptions):
    """The same, and the drafter that is trained."""

    recipe: Annotated[Literal["eagle1", "eagle3"], Option("architecture of the drafter")] = "eagle3"
    unroll_steps: Annotated[int, Option("draft depths that are trained", low=1)] = 4
