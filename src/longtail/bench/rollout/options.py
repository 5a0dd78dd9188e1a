"""Options of `longtail bench rollout`."""

from dataclasses import dataclass
from typing import Annotated

from longtail.bench.common.options import Json, Option, Quick

MODEL_NAMES = ("tiny", "100m", "text")
DRAFTER_NAMES = ("history", "eagle1", "eagle3")
DTYPES = {"tiny": "float32", "100m": "bfloat16", "text": "float32"}
"""Dtype of each model unless --dtype is given."""
_TIMES_SLOWER = {"100m": 6}


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
    drafters: Annotated[tuple[str, ...], Option("drafters", choices=DRAFTER_NAMES)] = DRAFTER_NAMES
    running: Annotated[
        tuple[int, ...], Option("requests running at a time", low=1, high=256, quick=(1, 8))
    ] = (1, 4, 8, 16, 32)
    dtype: Annotated[
        str | None,
        Option("", choices=("bfloat16", "float32"), default="default: float32, 100m bfloat16"),
    ] = None
    tokens: Annotated[
        int, Option("tokens of a turn with one request running", low=50, quick=300)
    ] = 1500
    repeats: Annotated[int, Option("turns of each contestant", low=1, quick=1)] = 3
    threads: Annotated[int, Option("compute threads", low=1)] = 1
    quick: Quick = False
    json: Json = False

    def dtype_of(self, model: str) -> str:
        """Return the dtype in which a model computes."""
        return self.dtype or DTYPES[model]

    def tokens_of(self, model: str) -> int:
        """Return the tokens of a turn with one request running: fewer for the 100M model."""
        return max(self.tokens // _TIMES_SLOWER.get(model, 1), 50)
