"""Options of `longtail bench e2e`."""

from dataclasses import dataclass
from typing import Annotated

from longtail.bench.common.options import Json, Option
from longtail.errors import ConfigError

_GROUP_SIZE = 8
_ARMS = ("off", "history", "frozen", "serial", "spot", "cold", "unplaced")


@dataclass(frozen=True, slots=True, kw_only=True)
class E2eBenchOptions:
    """Arms, and the training run that all arms make."""

    arms: Annotated[
        tuple[str, ...],
        Option("arms", choices=_ARMS, quick=("off", "spot"), default="default: all but unplaced"),
    ] = _ARMS[:-1]
    steps: Annotated[int, Option("training steps of each arm", low=1, quick=2)] = 20
    workers: Annotated[int, Option("worker processes", low=1)] = 2
    prompts: Annotated[int, Option("prompts of a step, 8 completions each", low=1, quick=2)] = 16
    model: Annotated[
        str, Option("100m: the same function in a larger shape", choices=("tiny", "100m"))
    ] = "tiny"
    dtype: Annotated[
        str,
        Option("bfloat16 keeps float32 master weights", choices=("float32", "float64", "bfloat16")),
    ] = "float32"
    drafter: Annotated[
        str | None,
        Option("drafter of frozen, serial and spot (default: the model's own)", "DIR"),
    ] = None
    learning_rate: Annotated[float, Option("learning rate of the policy")] = 3e-4
    problems: Annotated[
        int, Option("distinct prompts; they repeat after that", low=1, group="task")
    ] = 2048
    switch_task: Annotated[
        int | None, Option("first step on differently worded prompts", group="task")
    ] = None
    plot: Annotated[str | None, Option("PNG file for the last step of off and spot", "FILE")] = None
    curves: Annotated[str | None, Option("PNG file for accept length by step", "FILE")] = None
    quick: Annotated[bool, Option("completions of at most 256 tokens, and smaller defaults:")] = (
        False
    )
    json: Json = False

    def __post_init__(self) -> None:
        """Refuse combinations that contradict each other."""
        if self.arms[0] != "off":
            given = ",".join(self.arms)
            raise ConfigError(f"--arms = {given!r}: off comes first, all others are compared to it")
        if self.drafter and self.model != "tiny":
            raise ConfigError(f"--drafter = {self.drafter!r}: --model {self.model} has its own")
        if self.switch_task is not None and not 1 < self.switch_task <= self.steps:
            raise ConfigError(
                f"--switch-task = {self.switch_task}: it must be 2 to {self.steps}, the last step"
            )

    @property
    def overrides(self) -> tuple[str, ...]:
        """Configuration of all arms, on top of the quickstart's recipe.

        `max_running` is the share of a worker and one group: many arms share this machine's memory.
        """
        prompts_per_worker = -(-self.prompts // self.workers)
        autocast = self.dtype == "bfloat16"
        return (
            f"--cluster.workers={self.workers}",
            "--run.threads=1",
            f"--run.steps={self.steps}",
            "--run.checkpoint_every=1000000",
            "--data.heldout_size=0",
            f"--data.size={self.problems}",
            f"--rollout.prompts_per_step={self.prompts}",
            f"--rollout.group_size={_GROUP_SIZE}",
            f"--rollout.max_running={_GROUP_SIZE * (prompts_per_worker + 1)}",
            f"--rollout.dtype={self.dtype}",
            f"--learner.dtype={'float32' if autocast else self.dtype}",
            f"--learner.autocast={str(autocast).lower()}",
            f"--learner.learning_rate={self.learning_rate}",
            *([f"--speculation.drafter={self.drafter}"] if self.drafter else []),
            *(["--rollout.max_tokens=256"] if self.quick else []),
        )
