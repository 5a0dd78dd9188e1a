"""Options of `longtail bench tuner`."""

from dataclasses import dataclass
from typing import Annotated

from longtail.bench.common.options import (
    OWN_DTYPE,
    Json,
    Option,
    OwnDrafter,
    OwnModel,
    OwnPrompts,
    check_own,
)
from longtail.errors import ConfigError

SHARES = {"good": 0.0, "mediocre": 0.3, "adversarial": 1.0}
"""Drafters, with the share of each drafter's tokens that is replaced by wrong ones."""
RECIPE = "eagle1"
MAX_RUNNING = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TunerBenchOptions:
    """Drafters, numbers of running requests and parts."""

    model: OwnModel = None
    prompts: OwnPrompts = None
    drafter: OwnDrafter = None
    running: Annotated[
        tuple[int, ...], Option("requests running at a time", low=1, high=256, quick=(1, 8))
    ] = (1, 2, 4, 8, 16, 32, 64)
    drafters: Annotated[tuple[str, ...], Option("drafters", choices=tuple(SHARES))] = tuple(SHARES)
    dtype: Annotated[
        str | None,
        Option("", choices=("bfloat16", "float32"), default="default float32, --model bfloat16"),
    ] = None
    tokens: Annotated[
        int, Option("tokens of a turn with one request running", low=50, quick=200)
    ] = 800
    repeats: Annotated[int, Option("turns of each contestant", low=1, quick=1)] = 3
    threads: Annotated[int, Option("compute threads", low=1)] = 1
    sweep: Annotated[bool, Option("leave out the fixed numbers of requests, and the oracle")] = True
    rollout: Annotated[bool, Option("leave out the whole rollout")] = True
    plot: Annotated[
        str | None, Option("PNG file for a picture of the budget tuner's rollout", "FILE")
    ] = None
    quick: Annotated[
        bool, Option("16 requests in the whole rollout in place of 128, and smaller defaults:")
    ] = False
    json: Json = False

    def __post_init__(self) -> None:
        """Refuse combinations that contradict each other."""
        check_own(self.model, {"--prompts": self.prompts, "--drafter": self.drafter})
        if self.model is not None and self.drafter in (None, "history"):
            raise ConfigError(
                f"--model = {self.model!r}: give a trained drafter by --drafter DIR; history would "
                "remember the texts of the turns before"
            )
        if not self.sweep and not self.rollout:
            raise ConfigError("--no-sweep and --no-rollout together leave nothing to measure")
        if self.plot and not self.rollout:
            raise ConfigError("--plot draws the rollout, and --no-rollout leaves it out")

    @property
    def dtype_name(self) -> str:
        """Dtype in which the model computes."""
        return self.dtype or ("float32" if self.model is None else OWN_DTYPE)

    @property
    def num_requests(self) -> int:
        """Number of requests of the whole rollout."""
        return 16 if self.quick else 128

    def tokens_at(self, running: int) -> int:
        """Return the tokens of a turn with `running` requests."""
        return self.tokens * max(min(running, 2), running // 4)
