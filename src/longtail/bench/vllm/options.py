"""Options of `longtail bench vllm`."""

from dataclasses import dataclass
from typing import Annotated

from longtail.bench.common.options import Json, Option

PARTS = ("export", "rules", "live")


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmBenchOptions:
    """Drafters, their target and the prompts."""

    python: Annotated[str, Option("python of an environment with vLLM", "PATH")]
    parts: Annotated[
        tuple[str, ...],
        Option("exported drafters greedily, rules of drafting, a live drafter", choices=PARTS),
    ] = PARTS
    drafters: Annotated[
        tuple[str, ...],
        Option("drafters to export", "NAMES", default="default: both of the tiny reasoner"),
    ] = ("tiny-reasoner:eagle1", "tiny-reasoner:eagle3")
    earlier: Annotated[
        str | None,
        Option("drafter that the last one replaces in mid-run (default: fresh weights)", "NAME"),
    ] = None
    target: Annotated[str, Option("model of the drafters", "MODEL")] = "tiny-reasoner"
    prompts: Annotated[
        str | None, Option("as data.source of train (default: held-out prompts)", "SOURCE")
    ] = None
    n: Annotated[int, Option("number of prompts", low=1)] = 16
    max_tokens: Annotated[int, Option("tokens of the longest completion", low=2)] = 512
    depth: Annotated[int, Option("depth of the draft chains", low=1, high=16)] = 4
    temperature: Annotated[float, Option("sampling temperature of rules and live")] = 1.0
    dtype: Annotated[
        str, Option("dtype of vLLM in rules and live", choices=("float32", "bfloat16"))
    ] = "float32"
    block_rows: Annotated[
        int, Option("rows per product of coupled engines, as in the plugin; 0: all", low=0)
    ] = 0
    max_running: Annotated[int, Option("requests running at a time", low=1)] = 8
    repeats: Annotated[int, Option("turns of each rule", low=1)] = 3
    timeout: Annotated[int, Option("seconds one vLLM may take", "S")] = 600
    json: Json = False
