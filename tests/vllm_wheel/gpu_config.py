"""vLLM's whole configuration of an H100 for what `longtail train` asks of it; run by path.

    python -I gpu_config.py DIR WORDS... -- SRC TESTS

A GPU is pretended as far as configuration goes, so no engine starts. One JSON object on standard
output.
"""

import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

_CARD = SimpleNamespace(
    major=9, minor=0, name="NVIDIA H100 80GB HBM3", total_memory=80 * 2**30,
    multi_processor_count=132, warp_size=32,
)  # fmt: skip
_EXTENSIONS = ("vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch")


class Found(BaseException):
    """The configuration with which an engine would start."""


def pretend() -> None:
    """Let vLLM find an H100 with Triton."""
    from support.pretend_cuda import answer

    answer(get_device_name=_CARD.name, get_device_properties=_CARD, set_device=None)
    sys.modules.update({name: ModuleType(name) for name in _EXTENSIONS})
    import vllm.platforms as platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform

    platforms._current_platform = NonNvmlCudaPlatform()
    import vllm.config.vllm

    vllm.config.vllm.HAS_TRITON = True


def main(directory: str, *words: str) -> None:
    """Decide a run's configuration and stop where the engine would start."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.path[:0] = words[words.index("--") + 1 :]
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    pretend()
    from vllm.v1.engine.llm_engine import LLMEngine

    from longtail.assembly.plan import plan_run
    from longtail.assembly.precision import decided
    from longtail.assembly.vllm import open_vllm
    from longtail.config.rl import load
    from longtail.engine.request import EngineLimits
    from longtail.model.hf.model import load_model
    from longtail.model.hf.tokenizer import load_tokenizer

    def found(config: Any, **_: Any) -> Any:
        raise Found(config)

    LLMEngine.from_vllm_config = found
    given = [f"--model.path={directory}", "--run.device=cuda", *words[: words.index("--")]]
    own = decided(load(None, given))
    path = Path(directory)
    tokenizer = load_tokenizer(path)
    names = [own.speculation.drafter] if own.speculation.drafter != "none" else []
    limits = EngineLimits(max_running=64, max_step_tokens=2048, max_len=2048)
    try:
        open_vllm(plan_run(own, path), limits, names, tokenizer, load_model(path))
    except Found as error:
        config = error.args[0]
    drafts = config.speculative_config
    print(
        json.dumps(
            {
                "v2": config.use_v2_model_runner,
                "graphs": str(config.compilation_config.cudagraph_mode),
                "ahead": config.scheduler_config.async_scheduling,
                "method": drafts and drafts.method,
                "depth": drafts and drafts.num_speculative_tokens,
                "share": config.cache_config.gpu_memory_utilization,
                "kv_bytes": config.cache_config.kv_cache_memory_bytes,
                "tokens": config.scheduler_config.max_num_batched_tokens,
                "scheduled": config.scheduler_config.max_num_scheduled_tokens,
                "dtype": str(config.model_config.dtype),
            }
        ),
        file=replies,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
