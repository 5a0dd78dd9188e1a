"""Options of `longtail bench rollout`."""

from dataclasses import dataclass
from typing import Annotated

from longtail.bench.common.options import (
    OWN_DTYPE,
    Json,
    Option,
    OwnDrafter,
    OwnModel,
    OwnPrompts,
    Quick,
    check_own,
)

MODEL_NAMES = ("tiny", "100m", "text")
DRAFTER_NAMES = ("history", "eagle1", "eagle3")
DTYPES = {"tiny": "float32", "100m": "bfloat16", "text": "float32"}
"""Dtype of each model unless --dtype is given."""
_TIMES_SLOWER = {"tiny": 1, "text": 1}
_SLOWER = 6
"""Factor by which turns of other models have fewer tokens."""
OWN_DRAFTER = "drafter"
"""Name of the given drafter of a model of the user's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBenchOptions:
    """Models, drafters and numbers of running requests."""

    models: Annotated[
        tuple[str, ...],
        Option(
            "models",
            choices=MODEL_NAMES,
            quick=("tiny",),
            default="default: all; the first use of text trains it, about 12 minutes",
        ),
    ] = MODEL_NAMES
    model: OwnModel = None
    prompts: OwnPrompts = None
    drafter: OwnDrafter = None
    drafters: Annotated[tuple[str, ...], Option("drafters", choices=DRAFTER_NAMES)] = DRAFTER_NAMES
    running: Annotated[
        tuple[int, ...], Option("requests running at a time", low=1, high=256, quick=(1, 8))
    ] = (1, 4, 8, 16, 32)
    dtype: Annotated[
        str | None,
        Option(
            "",
            choices=("bfloat16", "float32"),
            default="default: float32, 100m and --model bfloat16",
        ),
    ] = None
    tokens: Annotated[
        int, Option("tokens of a turn with one request running", low=50, quick=300)
    ] = 1500
    repeats: Annotated[int, Option("turns of each contestant", low=1, quick=1)] = 3
    threads: Annotated[int, Option("compute threads", low=1)] = 1
    quick: Quick = False
    json: Json = False

    def __post_init__(self) -> None:
        """Refuse combinations that contradict each other."""
        check_own(self.model, {"--prompts": self.prompts, "--drafter": self.drafter})

    @property
    def model_names(self) -> tuple[str, ...]:
        """Models to measure."""
        return self.models if self.model is None else (self.model,)

    def dtype_of(self, model: str) -> str:
        """Return the dtype in which a model computes."""
        return self.dtype or DTYPES.get(model, OWN_DTYPE)

    def tokens_of(self, model: str) -> int:
        """Return the tokens of a turn with one request running: fewer for large models."""
        return max(self.tokens // _TIMES_SLOWER.get(model, _SLOWER), 50)
