"""Options of `longtail bench e2e`."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated

from longtail.bench.common.options import Json, Option
from longtail.errors import ConfigError

_GROUP_SIZE = 8
_ARMS = ("off", "history", "frozen", "serial", "spot", "cold", "unplaced")
_RUN_ARMS = ("off", "history", "frozen", "spot", "cold")
_FIELD_OF: Mapping[str, str] = {
    "workers": "cluster.workers",
    "prompts": "rollout.prompts_per_step",
    "model": "model.path",
    "dtype": "rollout.dtype",
    "learning_rate": "learner.learning_rate",
    "problems": "data.size",
}
"""Field of a run's configuration that an option stands for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class E2eBenchOptions:
    """Arms, and the training run that all arms make."""

    run: Annotated[
        str | None,
        Option(
            "TOML file or recipe to measure as it is; default: the tiny reasoner, by the options "
            "below",
            "RUN",
            positional=True,
        ),
    ] = None
    arms: Annotated[
        tuple[str, ...],
        Option(
            "arms",
            choices=_ARMS,
            quick=("off", "spot"),
            default=f"default: all but unplaced; of RUN {', '.join(_RUN_ARMS)}",
        ),
    ] = ()
    steps: Annotated[
        int, Option("training steps of each arm, at most run.steps of RUN", low=1, quick=2)
    ] = 20
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
        Option("drafter of frozen, serial and spot (default: that of the model or RUN)", "DIR"),
    ] = None
    learning_rate: Annotated[float, Option("learning rate of the policy")] = 3e-4
    problems: Annotated[
        int, Option("distinct prompts; they repeat after that", low=1, group="task")
    ] = 2048
    switch_task: Annotated[
        int | None, Option("first step on differently worded prompts", group="task")
    ] = None
    memory: Annotated[
        float | None, Option("GB that all arms may take (default: what is free)", low=0)
    ] = None
    peer_python: Annotated[
        str | None,
        Option("python of an environment with TRL, for its update on the same texts", "PATH"),
    ] = None
    plot: Annotated[str | None, Option("PNG file for the last step of off and spot", "FILE")] = None
    curves: Annotated[str | None, Option("PNG file for accept length by step", "FILE")] = None
    quick: Annotated[bool, Option("completions of at most 256 tokens, and smaller defaults:")] = (
        False
    )
    json: Json = False
    overrides: Annotated[
        tuple[str, ...], Option("--section.key VALUE sets a field of RUN, as for longtail train")
    ] = ()

    def __post_init__(self) -> None:
        """Refuse combinations that contradict each other."""
        if self.arm_names[0] != "off":
            given = ",".join(self.arms)
            raise ConfigError(f"--arms = {given!r}: off comes first, all others are compared to it")
        if len(set(self.arm_names)) < len(self.arm_names):
            raise ConfigError(f"--arms = {','.join(self.arms)!r}: each arm is given once")
        if self.run is not None:
            self._refuse_shape_of_run()
        elif self.overrides:
            raise ConfigError(f"{self.overrides[0]}: it sets a field of RUN; give the TOML file")
        if self.drafter and self.model != "tiny":
            raise ConfigError(f"--drafter = {self.drafter!r}: --model {self.model} has its own")
        if self.switch_task is not None and not 1 < self.switch_task <= self.steps:
            raise ConfigError(
                f"--switch-task = {self.switch_task}: it must be 2 to {self.steps}, the last step"
            )

    def _refuse_shape_of_run(self) -> None:
        """Refuse options whose place is in the configuration of RUN."""
        if self.quick:
            raise ConfigError("--quick makes another run than RUN; give --steps and --arms")
        if self.switch_task is not None:
            raise ConfigError("--switch-task: RUN has its own prompts (data.source)")
        defaults = {each.name: each.default for each in fields(self)}
        for option, name in _FIELD_OF.items():
            if getattr(self, option) != defaults[option]:
                flag = f"--{option.replace('_', '-')} = {getattr(self, option)}"
                raise ConfigError(f"{flag}: RUN says this by {name}; give --{name} VALUE")

    @property
    def arm_names(self) -> tuple[str, ...]:
        """Arms to measure."""
        return self.arms or (_ARMS[:-1] if self.run is None else _RUN_ARMS)

    @property
    def tiny_words(self) -> tuple[str, ...]:
        """Configuration of all arms without RUN, on top of the recipe `tiny`.

        `max_running` is the share of a worker and one group: many arms share this machine's memory.
        """
        prompts_per_worker = -(-self.prompts // self.workers)
        autocast = self.dtype == "bfloat16"
        return (
            f"--cluster.workers={self.workers}",
            "--run.threads=1",
            f"--run.steps={self.steps}",
            "--data.heldout_size=0",
            f"--data.size={self.problems}",
            f"--rollout.prompts_per_step={self.prompts}",
            f"--rollout.group_size={_GROUP_SIZE}",
            f"--rollout.max_running={_GROUP_SIZE * (prompts_per_worker + 1)}",
            f"--rollout.dtype={self.dtype}",
            f"--learner.dtype={'float32' if autocast else self.dtype}",
            f"--learner.autocast={'auto' if autocast else 'false'}",
            f"--learner.learning_rate={self.learning_rate}",
            *(["--rollout.max_tokens=256"] if self.quick else []),
        )
