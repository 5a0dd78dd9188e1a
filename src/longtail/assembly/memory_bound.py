"""Bound on a run's memory, by arithmetic on the model's shape; no weight is loaded.

`longtail train --dry-run` prints it, and a run is refused if it exceeds the free memory. On a GPU
vLLM takes its share of the whole card, which must hold the weights and a text.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from longtail.assembly.plan import RunPlan, plan_run
from longtail.config.rl import RunConfig
from longtail.errors import ConfigError
from longtail.model.kernels.fixed_point import sum_bytes
from longtail.model.size import activation_bytes, count_parameters, kv_bytes
from longtail.rl.logprobs import MAX_LOGITS
from longtail.rl.policy import holds_bfloat16
from longtail.run.base_model import model_directory
from longtail.system import machine
from longtail.vllm.start import GPU_SHARE

_KEYS_SHARE = 0.7
"""Keys and values' part of what vLLM's weights leave, beside activations and graphs."""
_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}
_VLLM, _KV = "share of vLLM", "KV cache"
_ACTIVATIONS, _GRADIENTS = "activations and scores", "gradients"
PASSING = (_ACTIVATIONS, _GRADIENTS)
"""Uses that end with a learner step."""
_REMEDIES = {
    _KV: "rollout.max_running, rollout.max_tokens or rollout.kv_tokens",
    _ACTIVATIONS: "learner.tokens_per_micro_batch, or set learner.gradient_checkpointing = true",
    _GRADIENTS: "cluster.workers, or set learner.sums = 'float' or learner.lora",
    _VLLM: "rollout.vllm.gpu_memory_utilization",
}


def estimate(plan: RunPlan) -> dict[str, int]:
    """Return the bytes of each use of memory by one worker.

    Each is an upper bound at its own moment, and their sum bounds the peak but for a drafter, which
    is a layer. Weights and keys and values of rollouts on a GPU are in vLLM's share; those on a CPU
    have a packed copy in bfloat16.
    """
    config, shape, on_cpu = plan.config, plan.shape, plan.device.type == "cpu"
    rollout, learner, workers = config.rollout, config.learner, config.cluster
    small, master = _BYTES[rollout.dtype], _BYTES[learner.dtype]
    whole, longest = count_parameters(shape), config.longest(config.data.max_prompt_len)
    outside = shape.vocab_size * shape.hidden_size * (1 if shape.tied_embeddings else 2)
    trained, cast = whole, 2 if learner.autocast is True else 0
    weights = (master + cast) * whole
    if learner.lora is not None:
        ends = 7 * shape.hidden_size + 3 * shape.intermediate_size  # of an adapter's two matrices
        ends += 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim
        trained = shape.num_layers * learner.lora.rank * ends
        if holds_bfloat16(plan.directory, learner):
            weights -= master * (whole - outside - shape.hidden_size)
    elif config.is_sharded:  # and gathered: by a GPU two layers at a time, and all of their casts
        trained = -(-whole // workers.workers)
        gathered = 2 * whole if on_cpu else min(whole, outside + 2 * whole // shape.num_layers)
        weights = master * (trained + gathered) + cast * (trained if on_cpu else whole)
    if learner.kl_coef > 0 and learner.lora is None:
        weights += master * trained  # of the reference model
    is_exact = learner.sums != "float" and not config.is_sharded
    undoes = workers.workers > 1 < learner.mini_batches and not config.is_sharded
    tokens = max(learner.tokens_per_micro_batch, longest)
    scores = min(tokens, max(1, MAX_LOGITS // shape.vocab_size)) * shape.vocab_size
    activations = activation_bytes(shape, tokens, master, recompute=learner.gradient_checkpointing)
    found = {
        "learner weights": weights,
        _GRADIENTS: trained * sum_bytes(getattr(torch, learner.dtype), exact=is_exact),
        "optimizer moments": trained * master * (5 if undoes else 2),
        _ACTIVATIONS: activations + 4 * scores * master,
    }
    if on_cpu:
        found["rollout weights"] = whole * small * (2 if rollout.dtype == "bfloat16" else 1)
        found[_KV] = (rollout.kv_tokens or rollout.max_running * longest) * kv_bytes(shape, small)
    else:
        found[_VLLM] = round(_vllm_share(plan) * torch.cuda.mem_get_info(plan.device)[1])
    return found


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


def check(plan: RunPlan) -> None:
    """Raise ConfigError if a run may need more memory than is free."""
    available, found = available_bytes(plan.device), estimate(plan)
    needed = _needed(plan, found)
    if available is not None and needed > available:
        largest = max(found, key=lambda name: found[name])
        remedy = _REMEDIES.get(largest, "cluster.workers, or train a smaller model")
        raise ConfigError(
            f"the run needs up to {needed / 1e9:.1f} GB of memory, and {available / 1e9:.1f} GB "
            f"are free; most is for {largest}: lower {remedy} (--dry-run shows all parts)"
        )


def _needed(plan: RunPlan, found: Mapping[str, int]) -> int:
    """Return the bytes of all workers of a device; of a cluster one worker is counted.

    A vLLM that may sleep and the learner take turns. A worker that learns ahead of others may hold
    gradients while it generates.
    """
    cluster, each = plan.config.cluster, sum(found.values())
    workers = 1 if cluster.address else cluster.workers
    if _VLLM in found:
        workers = min(workers, max(1, int(1 / plan.gpus)))
        if _argument(plan, "enable_sleep_mode", 0.0):
            passing = PASSING if cluster.workers == 1 else (_ACTIVATIONS,)
            each -= min(found[_VLLM], sum(found[name] for name in passing))
    return workers * each


def _vllm_share(plan: RunPlan) -> float:
    """Return the share of a GPU that the vLLM of a worker takes."""
    return _argument(plan, "gpu_memory_utilization", GPU_SHARE * min(1.0, plan.gpus))


def _argument(plan: RunPlan, name: str, default: float) -> float:
    """Return a number among vLLM's arguments; what is none is refused by vLLM itself."""
    given = (plan.config.rollout.vllm or {}).get(name)
    return float(given) if isinstance(given, int | float) else default  # true is 1


def vllm_arguments(plan: RunPlan) -> dict[str, Any]:
    """Return arguments of vLLM on a GPU that workers share: none measures what others hold."""
    if not 0 < plan.gpus < 1:
        return {}
    share = _vllm_share(plan)
    weights = _BYTES[plan.config.rollout.dtype] * count_parameters(plan.shape)
    rest = round(share * torch.cuda.mem_get_info(plan.device)[1]) - weights
    keys = max(1, int(_KEYS_SHARE * rest))
    return {"gpu_memory_utilization": share, "kv_cache_memory_bytes": keys}


def report(config: RunConfig) -> str:
    """Return the parts and the free memory as lines."""
    notes = list[str]()
    plan = fitted(plan_run(config, model_directory(config.model.path)), notes.append)
    found, available = estimate(plan), available_bytes(plan.device)
    rows = {**found, "total": sum(found.values()), f"available on {plan.device}": available}
    lines = (
        f"{name:<36}{'?' if size is None else f'{size / 1e9:.3f}':>10}"
        for name, size in rows.items()
    )
    title = f"memory, {count_parameters(plan.shape):,} parameters (GB of each worker)"
    return "\n".join([title, *lines, *notes])


def available_bytes(device: torch.device) -> int | None:
    """Return the free bytes of a device; None if they are unknown."""
    on_gpu = device.type == "cuda"
    return torch.cuda.mem_get_info(device)[0] if on_gpu else machine.memory().available
