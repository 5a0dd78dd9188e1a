"""Options of `longtail bench learner` and `longtail bench drafter`."""

from dataclasses import dataclass
from typing import Annotated, Literal

from longtail.bench.common.options import Json, Option


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutBenchOptions:
    """Sequences of a step, and how they are cut into micro-batches."""

    threads: Annotated[int, Option("compute threads")] = 1
    repeats: Annotated[int, Option("measured rounds", low=1)] = 5
    sequences: Annotated[int, Option("sequences of a step", low=1)] = 32
    rows: Annotated[int, Option("sequences of a micro-batch", low=1)] = 8
    budget: Annotated[int, Option("tokens of a micro-batch under a token budget", low=1)] = 4096
    json_only: Json = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBenchOptions(LayoutBenchOptions):
    """The same, or steps of a user's own model."""

    model: Annotated[
        str | None, Option("time a step of this model instead, as model.path of train", "MODEL")
    ] = None
    mean_tokens: Annotated[int, Option("with --model: mean tokens of a completion", low=2)] = 116
    prompt_tokens: Annotated[int, Option("with --model: tokens of a prompt", low=1)] = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerBenchOptions(StepBenchOptions):
    """Sequences of a step, or a model whose step is timed beside other trainers."""

    peer_python: Annotated[
        str | None,
        Option("python of an environment with TRL, for a step of its trainer, too", "PATH"),
    ] = None
    completions: Annotated[int, Option("with --model: completions of a step", low=2)] = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterBenchOptions(StepBenchOptions):
    """Sequences of a step, or a model for which a fresh drafter is trained."""

    recipe: Annotated[Literal["eagle1", "eagle3"], Option("architecture of the drafter")] = "eagle3"
    unroll_steps: Annotated[int, Option("draft depths that are trained", low=1)] = 4
