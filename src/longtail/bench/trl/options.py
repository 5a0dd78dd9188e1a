"""Options of `longtail bench trl`."""

from dataclasses import dataclass
from typing import Annotated, Literal

from longtail.bench.common.options import Json, Option


@dataclass(frozen=True, slots=True, kw_only=True)
class TrlBenchOptions:
    """The trainer, its batch and the arms."""

    peer_python: Annotated[
        str | None, Option("python of an environment with TRL (default: this one)", "PATH")
    ] = None
    model: Annotated[str, Option("model to train, as model.path of train", "MODEL")] = "smollm2"
    completions: Annotated[int, Option("completions of a step", low=2)] = 64
    group: Annotated[int, Option("completions of a prompt", low=2)] = 8
    micro_batch: Annotated[int, Option("completions of a forward and backward pass", low=1)] = 4
    max_tokens: Annotated[int, Option("tokens of the longest completion", low=2)] = 512
    steps: Annotated[int, Option("updates of the arms with longtail", low=1)] = 12
    trl_steps: Annotated[int, Option("updates of TRL alone; the first ones", low=0)] = 2
    dtype: Annotated[Literal["float32", "bfloat16"], Option("type of the trainer's products")] = (
        "float32"
    )
    learning_rate: Annotated[float, Option("learning rate of AdamW")] = 1e-6
    seed: Annotated[int, Option("seed of prompts and noise", low=0)] = 0
    threads: Annotated[int, Option("threads of each process", low=1)] = 2
    json: Json = False
