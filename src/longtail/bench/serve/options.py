"""Options of `longtail bench serve`."""

import sys
from dataclasses import dataclass
from typing import Annotated

from longtail.bench.common.options import Json, Option, Quick
from longtail.bench.rollout.options import DTYPES

MODEL_NAMES = ("tiny", "100m")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeBenchOptions:
    """Models, clients and temperatures."""

    models: Annotated[tuple[str, ...], Option("models", choices=MODEL_NAMES, quick=("tiny",))] = (
        MODEL_NAMES
    )
    clients: Annotated[
        tuple[int, ...], Option("concurrent clients", low=1, high=64, quick=(1, 8))
    ] = (1, 2, 4, 8, 16, 32)
    temperatures: Annotated[tuple[float, ...], Option("sampling temperatures", low=0, high=2)] = (
        0.0,
        1.0,
    )
    dtype: Annotated[
        str | None,
        Option("", choices=("bfloat16", "float32"), default="default: float32, 100m bfloat16"),
    ] = None
    tokens: Annotated[int, Option("tokens of the longest completion", low=2, quick=48)] = 96
    calls: Annotated[int, Option("calls of each client in a turn", low=1)] = 2
    repeats: Annotated[int, Option("turns of each server", low=1, quick=1)] = 3
    threads: Annotated[int, Option("compute threads", low=1)] = 1
    peer_python: Annotated[
        str,
        Option(
            "python with transformers serve, to compare with; none: no comparison",
            "PYTHON",
            default="default: this one",
        ),
    ] = sys.executable
    soak: Annotated[
        int | None, Option("only send N requests, valid and invalid, and check the server", low=1)
    ] = None
    quick: Quick = False
    json: Json = False

    def dtype_of(self, model: str) -> str:
        """Return the dtype in which a model computes."""
        return self.dtype or DTYPES[model]
