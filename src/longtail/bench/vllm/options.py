"""Options of `longtail bench vllm`."""

from dataclasses import dataclass
from typing import Annotated

from longtail.bench.common.options import Json, Option


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmBenchOptions:
    """Drafters, their target and the prompts."""

    python: Annotated[str, Option("python of an environment with vLLM", "PATH")]
    drafters: Annotated[
        tuple[str, ...],
        Option("drafters to export", "NAMES", default="default: both of the tiny reasoner"),
    ] = ("tiny-reasoner:eagle1", "tiny-reasoner:eagle3")
    target: Annotated[str, Option("model of the drafters", "MODEL")] = "tiny-reasoner"
    prompts: Annotated[
        str | None, Option("as data.source of train (default: held-out prompts)", "SOURCE")
    ] = None
    n: Annotated[int, Option("number of prompts")] = 16
    max_tokens: Annotated[int, Option("tokens of the longest completion")] = 512
    depth: Annotated[int, Option("depth of the draft chains")] = 4
    timeout: Annotated[int, Option("seconds one vLLM may take", "S")] = 600
    json: Json = False
