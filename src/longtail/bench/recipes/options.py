"""Options of `longtail bench recipes`."""

from dataclasses import dataclass
from typing import Annotated

from longtail.bench.common.options import Json, Option, Quick

RECIPE_NAMES = ("recipe", "steps", "eagle1", "eagle1-adamw", "eagle3", "eagle3-slow")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipesBenchOptions:
    """The target, its texts, and the recipes that are compared on them."""

    model: Annotated[str, Option("target, as model.path of train", "MODEL")] = "smollm2"
    prompts: Annotated[str, Option("prompts, as data.source of train", "SOURCE")] = (
        "reasoning_gym:chain_sum"
    )
    recipes: Annotated[tuple[str, ...], Option("recipes", choices=RECIPE_NAMES)] = RECIPE_NAMES
    points: Annotated[
        tuple[int, ...],
        Option("trained tokens at which to measure", low=500, quick=(2000, 4000)),
    ] = (5_000, 10_000, 25_000, 50_000, 100_000)
    samples: Annotated[int, Option("completions of each prompt", low=1)] = 8
    max_tokens: Annotated[int, Option("longest completion in tokens", low=16, quick=64)] = 256
    heldout: Annotated[int, Option("held-out texts, of prompts of their own", low=8)] = 64
    dtype: Annotated[str, Option("of the target", choices=("bfloat16", "float32"))] = "bfloat16"
    threads: Annotated[int, Option("compute threads", low=1)] = 1
    quick: Quick = False
    json: Json = False
