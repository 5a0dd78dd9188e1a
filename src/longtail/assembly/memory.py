"""Bound on a run's memory, by arithmetic on the model's shape; no weight is loaded.

Every part is an upper bound at its own moment, and the sum bounds the peak.
`longtail train --dry-run` prints it, and a run is refused if it exceeds the free memory. On a GPU
vLLM takes its share of the whole card, which must hold the weights and a text.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from longtail.assembly.drafters import AUTO, FRESH, NONE, WEIGHTLESS
from longtail.assembly.engine import model_directory
from longtail.assembly.plan import RunPlan, plan_run
from longtail.assembly.policy import holds_bfloat16
from longtail.config.rl import RunConfig
from longtail.errors import ConfigError
from longtail.model.kernels.fixed_point import sum_bytes
from longtail.model.transformer import ModelConfig
from longtail.rl.logprobs import MAX_LOGITS
from longtail.system import machine
from longtail.vllm.guards import VllmSettings
from longtail.vllm.start import GPU_SHARE

_KEYS_SHARE = 0.7
"""Keys and values' part of what vLLM's weights leave, beside activations and graphs."""
_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}
_WEIGHTS, _VLLM = "rollout weights", "share of vLLM"
_KV, _ACTIVATIONS, _DRAFTER = "KV cache", "activations and scores", "drafter"
_GRADIENTS = "gradients"
PASSING = (_ACTIVATIONS, _GRADIENTS)
"""Uses that end with a learner step."""
_REMEDIES = {
    _KV: "rollout.max_running, rollout.max_tokens or rollout.kv_tokens",
    _ACTIVATIONS: "learner.tokens_per_micro_batch, or set learner.gradient_checkpointing = true",
    _GRADIENTS: "cluster.workers, or set learner.sums = 'float' or learner.lora",
    _DRAFTER: "spot.buffer_mb or spot.features_mb, or set speculation.drafter = 'history'",
}


def count_parameters(shape: ModelConfig) -> int:
    """Count the weights of a decoder of this shape; a tied head is counted once."""
    embeddings = shape.vocab_size * shape.hidden_size * (1 if shape.tied_embeddings else 2)
    return embeddings + shape.num_layers * _layer_parameters(shape) + shape.hidden_size


def _adapter_parameters(shape: ModelConfig, rank: int) -> int:
    """Count the parameters of adapters of all matrices inside layers."""
    hidden, wide, dim = shape.hidden_size, shape.intermediate_size, shape.head_dim
    heads, kv_heads = shape.num_heads * dim, shape.num_kv_heads * dim
    ends = 4 * hidden + 2 * heads + 2 * kv_heads + 3 * (hidden + wide)
    return shape.num_layers * rank * ends


def estimate(plan: RunPlan) -> dict[str, int]:
    """Return the bytes of each use of memory by one worker.

    A CPU adds the packed copy of bfloat16 matrices, and whole weights gathered from shards; a GPU
    gathers layer by layer, and weights and keys and values of the rollout are in vLLM's share.
    """
    config, shape, on_cpu = plan.config, plan.shape, plan.device.type == "cpu"
    rollout, learner, spot = config.rollout, config.learner, config.spot
    small, master = _BYTES[rollout.dtype], _BYTES[learner.dtype]
    parameters, layer = count_parameters(shape), _layer_parameters(shape)
    longest = config.data.max_prompt_len + rollout.max_tokens
    tokens = max(learner.tokens_per_micro_batch, longest)
    scores = min(tokens, max(1, MAX_LOGITS // shape.vocab_size)) * shape.vocab_size
    weights = master * parameters
    shard = -(-weights // config.cluster.workers) if config.is_sharded else weights
    trained, saved = shard, 0
    gathered = 0
    if config.is_sharded:  # on a GPU all but two layers rest in their shards
        resting = max(0, shape.num_layers - 2) * layer
        gathered = 2 * weights if on_cpu else master * (parameters - resting)
    casts = 0
    if learner.autocast is True:  # on a GPU those of gathered layers stay until the pass ends
        casts = _BYTES["bfloat16"] * (shard if on_cpu else weights) // master
    if learner.lora is not None:
        trained = master * _adapter_parameters(shape, learner.lora.rank)
        if casts and holds_bfloat16(plan.directory, learner):
            saved = (master - _BYTES["bfloat16"]) * shape.num_layers * layer
            casts -= _BYTES["bfloat16"] * shape.num_layers * layer
    each = sum_bytes(getattr(torch, learner.dtype), exact=learner.sums != "float")
    sums = trained if config.is_sharded else each * trained // master
    names = set(config.speculation.drafter.split("+"))
    untrained = {NONE, *WEIGHTLESS, *((AUTO, FRESH) if plan.on_vllm else ())}  # vLLM learns its own
    found = {
        _VLLM: 0 if on_cpu else round(_vllm_share(plan) * torch.cuda.mem_get_info(plan.device)[1]),
        _WEIGHTS: parameters * small * (2 if rollout.dtype == "bfloat16" else 1) if on_cpu else 0,
        _KV: (rollout.kv_tokens or rollout.max_running * longest) * kv_bytes(shape, small)
        if on_cpu
        else 0,
        "weights": shard - saved,
        "weights in bfloat16": casts,
        _GRADIENTS: sums,
        "optimizer moments": 2 * trained,
        _ACTIVATIONS: 4 * scores * master
        + activation_bytes(shape, tokens, master, recompute=learner.gradient_checkpointing),
        "reference model": shard if learner.kl_coef > 0 and learner.lora is None else 0,
        "gathered weights": gathered,
        "undo of a step": 3 * trained
        if config.cluster.workers > 1 < learner.mini_batches and not config.is_sharded
        else 0,
        _DRAFTER: 4 * (7 * layer + 3 * min(MAX_LOGITS, spot.batch_tokens * shape.vocab_size))
        + (spot.buffer_mb + spot.features_mb) * 2**20
        if not names <= untrained
        else 0,
    }
    return {name: size for name, size in found.items() if size}


def fitted(plan: RunPlan, log: Callable[[str], None] = lambda line: None) -> RunPlan:
    """Return the plan with `learner.sums` for `auto`: exact, unless that exceeds the whole device.

    What is free there does not matter, so that a resumed run takes the same.
    """
    on_cpu, own = plan.device.type == "cpu", plan.config.learner
    total = machine.memory().total if on_cpu else torch.cuda.mem_get_info(plan.device)[1]
    if own.sums != "auto" or total is None or _needed(plan, estimate(plan)) <= total:
        return plan
    log("learner.sums = 'float': the device has no room for exact ones, 4 bytes a weight more")
    learner = own.model_copy(update={"sums": "float"})
    return replace(plan, config=plan.config.model_copy(update={"learner": learner}))


def _needed(plan: RunPlan, found: Mapping[str, int]) -> int:
    """Return the bytes of all workers of a device; of a cluster one worker is counted."""
    workers = 1 if plan.config.cluster.address else plan.config.cluster.workers
    if _VLLM in found:
        workers = min(workers, max(1, int(1 / plan.gpus)))
    return workers * (sum(found.values()) - _asleep(plan, found))


def check(plan: RunPlan) -> None:
    """Raise ConfigError if a run may need more memory than is free."""
    available, found = available_bytes(plan.device), estimate(plan)
    share, needed = found.get(_VLLM, 0), _needed(plan, found)
    if 0 < share < (least := _least_share(plan)):
        raise ConfigError(
            f"rollout.vllm.gpu_memory_utilization = {_vllm_share(plan):g}: vLLM's "
            f"{share / 1e9:.1f} GB of the GPU must hold the weights and one text, "
            f"{least / 1e9:.1f} GB: raise it, or set rollout.vllm.tensor_parallel_size"
        )
    if available is not None and needed > available:
        largest = max(found.keys() - {_VLLM}, key=lambda name: found[name])
        remedy = _REMEDIES.get(largest, "cluster.workers, or train a smaller model")
        if share and needed - share + least <= available:
            largest, remedy = _VLLM, "rollout.vllm.gpu_memory_utilization"
        raise ConfigError(
            f"the run needs up to {needed / 1e9:.1f} GB of memory, and {available / 1e9:.1f} GB "
            f"are free; most is for {largest}: lower {remedy} (--dry-run shows all parts)"
        )


def _asleep(plan: RunPlan, found: Mapping[str, int]) -> int:
    """Return the bytes that a vLLM that may sleep leaves to the learner, in turns.

    A worker that learns ahead of others may hold gradients while it generates, and the sums of a
    learned drafter stay where they are.
    """
    if not _argument(plan, "enable_sleep_mode", 0.0):
        return 0
    passing = PASSING if plan.config.cluster.workers == 1 else (_ACTIVATIONS,)
    sums = 4 * (VllmSettings().depth + 1) * (2 * plan.shape.hidden_size) ** 2
    return min(max(found.get(_VLLM, 0) - sums, 0), sum(found.get(name, 0) for name in passing))


def _vllm_share(plan: RunPlan) -> float:
    """Return the share of a GPU that the vLLM of a worker takes."""
    return _argument(plan, "gpu_memory_utilization", GPU_SHARE * min(1.0, plan.gpus))


def vllm_arguments(plan: RunPlan) -> dict[str, Any]:
    """Return arguments of vLLM on a GPU that workers share: none measures what others hold."""
    if not 0 < plan.gpus < 1:
        return {}
    share = _vllm_share(plan)
    weights = _BYTES[plan.config.rollout.dtype] * count_parameters(plan.shape)
    rest = round(share * torch.cuda.mem_get_info(plan.device)[1]) - weights
    return {
        "gpu_memory_utilization": share,
        "kv_cache_memory_bytes": max(1, int(_KEYS_SHARE * rest)),
    }


def _argument(plan: RunPlan, name: str, default: float) -> float:
    """Return a number among vLLM's arguments; what is none is refused by vLLM itself."""
    given = (plan.config.rollout.vllm or {}).get(name)
    return float(given) if isinstance(given, int | float) else default  # true is 1


def _least_share(plan: RunPlan) -> int:
    """Return the bytes of each GPU that vLLM needs for the weights and one text."""
    config, element = plan.config, _BYTES[plan.config.rollout.dtype]
    longest = config.data.max_prompt_len + config.rollout.max_tokens
    whole = element * count_parameters(plan.shape) + longest * kv_bytes(plan.shape, element)
    return int(whole / _argument(plan, "tensor_parallel_size", 1.0))


def report(config: RunConfig) -> str:
    """Return the parts and the free memory as lines."""
    notes = list[str]()
    plan = fitted(plan_run(config, model_directory(config.model.path)), notes.append)
    found, available = estimate(plan), available_bytes(plan.device)
    rows = {**found, "total": sum(found.values()), f"available on {plan.device}": available}
    lines = [f"memory, {count_parameters(plan.shape):,} parameters (GB of each worker)"]
    lines += [
        f"{name:<36}{'?' if size is None else f'{size / 1e9:.3f}':>10}"
        for name, size in rows.items()
    ]
    return "\n".join([*lines, *notes])


def available_bytes(device: torch.device) -> int | None:
    """Return the free bytes of a device; None if they are unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return machine.memory().available


def kv_bytes(shape: ModelConfig, element: int) -> int:
    """Return the bytes of keys and values of one token."""
    return 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * element


def activation_bytes(shape: ModelConfig, tokens: int, element: int, *, recompute: bool) -> int:
    """Estimate the bytes that the decoder keeps for the backward pass of one micro-batch.

    A layer keeps its input, two normed and one middle residual (4 hidden), queries, keys and values
    before and after norm and rotation, the attention output before and after its layout change, and
    five times the width of the feed-forward. Checkpointed layers keep their input alone, except for
    the one being recomputed.
    """
    heads, kv_heads = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    rotated = (2 if shape.qk_norm else 1) * (heads + kv_heads)
    layer = 4 * shape.hidden_size + rotated + (heads + 2 * kv_heads) + 2 * heads
    layer += 5 * shape.intermediate_size
    kept = shape.num_layers * shape.hidden_size + layer if recompute else shape.num_layers * layer
    return tokens * element * (kept + 2 * shape.hidden_size)


def _layer_parameters(shape: ModelConfig) -> int:
    hidden, wide, dim = shape.hidden_size, shape.intermediate_size, shape.head_dim
    qkv, heads = (shape.num_heads + 2 * shape.num_kv_heads) * dim, shape.num_heads * dim
    biases = shape.qkv_bias * qkv + shape.output_bias * hidden
    biases += shape.mlp_bias * (2 * wide + hidden)
    norms = 2 * hidden + (2 * dim if shape.qk_norm else 0)
    return hidden * qkv + heads * hidden + 3 * hidden * wide + biases + norms
