"""The choice of KV cache and its size, by device.

On a CPU memory is touched only where tokens are written, so the cache has the size that its
requests can need at most. On a GPU it is allocated at once, as far as memory is free.
"""

import torch

from longtail.engine.kv.cache import ContiguousKVCache, KVCache
from longtail.engine.kv.paged_cache import BLOCK_SIZE, PagedKVCache
from longtail.engine.request import EngineLimits
from longtail.errors import RequestError
from longtail.model.kernels.choice import select_page_kernels
from longtail.model.transformer import ModelConfig, Transformer
from longtail.speculation.tree import MAX_NODES

_ROW_BLOCK = 32
_USABLE = 0.9
"""Share of the free memory for KV; the rest is for activations and graphs."""
_SCORE_BYTES = 16
"""Bytes of a step per token and vocabulary entry: logits, float32 copy, noise, sum."""


def make_kv(model: Transformer, limits: EngineLimits) -> KVCache:
    """Make the cache for the model's device."""
    if model.device.type == "cpu":
        longest = _rounded(limits.max_len, _ROW_BLOCK)
        return ContiguousKVCache(
            model.config,
            num_tokens=_rounded(limits.kv_tokens or longest * limits.max_running, _ROW_BLOCK),
            max_rows=limits.max_running,
            max_len=_rounded(limits.max_len + MAX_NODES, _ROW_BLOCK),
            dtype=model.dtype,
            device=model.device,
            block_size=_ROW_BLOCK,
        )
    scores = limits.max_step_tokens * model.config.vocab_size * _SCORE_BYTES
    free = free_bytes(model.device) - limits.reserved_bytes - scores
    return PagedKVCache(
        model.config,
        num_tokens=paged_tokens(limits, kv_bytes(model.config, model.dtype), free),
        max_rows=limits.max_running,
        max_len=limits.max_len + MAX_NODES,
        dtype=model.dtype,
        device=model.device,
        kernels=select_page_kernels(model.dtype, model.device),
        batch_invariant=model.batch_invariant,
    )


def free_bytes(device: torch.device) -> int:
    """Return the free bytes of a GPU, including those that PyTorch reserves but does not use."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def kv_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Return the bytes of the keys and values of one token."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize


def paged_tokens(limits: EngineLimits, bytes_per_token: int, free_bytes: int) -> int:
    """Return the tokens of a paged cache in whole blocks; RequestError if too few fit.

    A given `kv_tokens` must fit. Otherwise the cache holds all requests at full length, or what
    fits; requests are preempted when it runs short.

    Example: 64 requests of 2560 tokens at 57 344 bytes each want 9.4 GB; with 6 GB free they get
    94 144 tokens in 1471 blocks
    """
    longest = _rounded(limits.max_len, BLOCK_SIZE)
    wanted = _rounded(limits.kv_tokens or longest * limits.max_running, BLOCK_SIZE)
    fitting = max(int(free_bytes * _USABLE) // bytes_per_token // BLOCK_SIZE * BLOCK_SIZE, 0)
    gigabytes = f"{max(free_bytes, 0) / 1e9:.1f} GB are free for KV on the GPU"
    if limits.kv_tokens and fitting < wanted:
        raise RequestError(
            f"rollout.kv_tokens = {limits.kv_tokens} needs "
            f"{wanted * bytes_per_token / 1e9:.1f} GB, "
            f"but {gigabytes}, enough for {fitting}; lower it, or set 0 to take what fits"
        )
    if fitting < longest:
        raise RequestError(
            f"one request of {limits.max_len} tokens (prompt and completion) needs "
            f"{longest * bytes_per_token / 1e9:.1f} GB of KV, but {gigabytes}; lower "
            "rollout.max_tokens or data.max_prompt_len, or take a smaller model"
        )
    return min(wanted, fitting)


def _rounded(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size) * block_size
