"""The start of vLLM's engine in this process; its errors name fields of a run's configuration."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from longtail.engine.request import EngineLimits
from longtail.errors import ConfigError, LongtailError
from longtail.system.device import to_stderr
from longtail.vllm.patching import KEY
from longtail.vllm.run_drafter import MAX_DEPTH, VllmDrafter

GPU_SHARE = 0.4
"""Share of a GPU's memory that vLLM takes unless told; the learner needs the rest."""
_GPU_STEP_TOKENS = 8192
"""Tokens of prompts in a step on a GPU: vLLM's default. With fewer it waits for its weights."""
_LONGEST = 300
_REMEDIES = {
    "raise rollout.vllm.gpu_memory_utilization, or lower rollout.max_tokens": (
        "cache blocks|kv cache is needed"
    ),
    "lower rollout.vllm.gpu_memory_utilization, or end what else uses the GPU": (
        "free memory on device|out of memory"
    ),
    "set rollout.vllm.tensor_parallel_size to a number of GPUs that divides the model's heads": (
        "world size|tensor parallel|attention heads|number of gpus"
    ),
    "set rollout.dtype = 'float32'": "compute capability|dtype",
    "install the vLLM of this machine's CUDA": (
        "undefined symbol|shared object|no module named|cuda driver"
    ),
}
"""Remedies, each with words of vLLM 0.32 and 0.33 in an error of its start."""


def start(
    directory: Path,
    limits: EngineLimits,
    dtype: torch.dtype,
    drafter: VllmDrafter | None,
    options: Mapping[str, Any],
) -> Any:
    """Start vLLM's engine in this process; `options` are further arguments of it.

    Raises ConfigError in one sentence with the field to change.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.llm_engine import LLMEngine

    on_cpu = current_platform.is_cpu()
    arguments: dict[str, Any] = {
        "model": str(directory),
        "skip_tokenizer_init": True,
        "dtype": str(dtype).removeprefix("torch."),
        "max_model_len": limits.max_len,
        "max_num_seqs": limits.max_running,
        "max_num_batched_tokens": step_tokens(limits, on_cpu=on_cpu),
        "logprobs_mode": "processed_logprobs",
        "enforce_eager": on_cpu,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "seed": 0,
        "additional_config": {KEY: {}},
        "speculative_config": drafter and drafter.config(),
        **({} if on_cpu else {"gpu_memory_utilization": GPU_SHARE}),
        **options,
    }
    try:
        config = EngineArgs(**arguments).create_engine_config()
        if on_cpu and config.cache_config.kv_cache_memory_bytes is None:
            config.cache_config.kv_cache_memory_bytes = _kv_bytes(config, limits, dtype)
        if not config.use_v2_model_runner:  # the plugin reads V1's steps when they are done
            config.scheduler_config.async_scheduling = False
        if not on_cpu:
            to_stderr("vLLM starts, in minutes; VLLM_LOGGING_LEVEL=INFO shows what it does")
        return LLMEngine.from_vllm_config(config, disable_log_stats=True)
    except LongtailError:  # of the plugin, which names its own field
        raise
    except (ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise start_error(directory, error) from error


def step_tokens(limits: EngineLimits, *, on_cpu: bool) -> int:
    """Return the most tokens of a step; on a GPU drafts take none from prompts."""
    if on_cpu:
        return limits.max_step_tokens
    drafts = limits.max_running * (1 + MAX_DEPTH)
    return max(limits.max_step_tokens, _GPU_STEP_TOKENS) + drafts


def start_error(directory: Path, error: Exception) -> ConfigError:
    """Return why vLLM cannot run a model, in one sentence, and what to change."""
    reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    said = reason.lower()
    helps = (remedy for remedy, words in _REMEDIES.items() if re.search(words, said))
    remedy = next(helps, "change rollout.vllm, or use another model")
    return ConfigError(f"vLLM cannot run {directory}: {reason[:_LONGEST]}; {remedy}")


def _kv_bytes(config: Any, limits: EngineLimits, dtype: torch.dtype) -> int:
    """Return the bytes of KV for the running requests, in whole blocks, and the drafter's layer."""
    model, parallel = config.model_config, config.parallel_config
    block = config.cache_config.block_size
    blocks = -(-(limits.max_len + MAX_DEPTH) // block) + 1
    tokens = (
        max(limits.kv_tokens, block) if limits.kv_tokens else limits.max_running * blocks * block
    )
    layers = model.get_num_layers(parallel) + 2
    heads = model.get_num_kv_heads(parallel)
    return 2 * tokens * layers * heads * model.get_head_size() * dtype.itemsize
