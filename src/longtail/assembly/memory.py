"""Estimate of a run's memory, by arithmetic on the model's shape; no weight is loaded.

Every term is an upper bound at its own moment; the sum is what to have, not what is always used.
`longtail train --dry-run` prints the table.

    rollout weights          parameters x rollout.dtype    (+ oneDNN's packed copies, bfloat16 CPU)
    KV cache                 2 x layers x kv heads x head_dim x tokens x rollout.dtype
    master weights, gradients, AdamW's two moments     4 x parameters x learner.dtype
                             (one shard of them per worker with learner.sharding = "full")
    activations              one micro-batch, kept for the backward pass
    scores                   rows x vocabulary, bounded by `rl.logprobs.MAX_LOGITS`
"""

import io
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from rich.console import Console
from rich.table import Table

from longtail.assembly.drafters import AUTO, FRESH
from longtail.assembly.models import TINY_REASONER, model_directory
from longtail.config.rl import RunConfig
from longtail.drafter.eagle.recipe import recipe_for
from longtail.model.hf.model import load_config
from longtail.model.transformer import ModelConfig
from longtail.rl.logprobs import MAX_LOGITS
from longtail.system import machine

_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}
_TITLES = {"kv_cache": "KV cache"}
_LOWERED = (("learner", "tokens_per_micro_batch", 1024), ("rollout", "max_running", 8))
"""Section, field and least value of what `fitted` lowers, in this order."""
_SCORE_COPIES = 4
"""Logits, log-probabilities, their exponentials and one gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One use of memory.

    Example: Item(bytes=83_886_080, why="163840 tokens")
    """

    bytes: int = 0
    why: str = ""
    """Size or type that determines the bytes, for the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Memory of a run on its device; a field without bytes is not used by the run."""

    parameters: int
    rollout_weights: Item = Item()
    packed_matrices: Item = Item()
    kv_cache: Item = Item()
    master_weights: Item = Item()
    published_weights: Item = Item()
    weight_shard: Item = Item()
    gathered_weights: Item = Item()
    whole_weights: Item = Item()
    gradients: Item = Item()
    optimizer_moments: Item = Item()
    activations: Item = Item()
    scores: Item = Item()
    reference_model: Item = Item()
    undo_of_a_step: Item = Item()
    drafter: Item = Item()

    @property
    def items(self) -> dict[str, Item]:
        """All uses of memory by name."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: item for name, item in found.items() if name != "parameters" and item.bytes}

    @property
    def total(self) -> int:
        """Bytes in total."""
        return sum(item.bytes for item in self.items.values())

    @property
    def made_later(self) -> int:
        """Bytes that stay allocated after the first learner step; the KV cache leaves them free."""
        return self.optimizer_moments.bytes + self.reference_model.bytes


def count_parameters(shape: ModelConfig) -> int:
    """Count the weights of a decoder of this shape; a tied head is counted once."""
    embeddings = shape.vocab_size * shape.hidden_size * (1 if shape.tied_embeddings else 2)
    return embeddings + shape.num_layers * _layer_parameters(shape) + shape.hidden_size


def estimate(config: RunConfig, shape: ModelConfig, *, on_cpu: bool = False) -> Estimate:
    """Estimate the memory of `longtail train`.

    `on_cpu` adds what lies in main memory: the packed copy of bfloat16 matrices, which a CPU keeps
    for generation, and the whole weights that are gathered from shards.
    """
    parameters = count_parameters(shape)
    rollout, learner = config.rollout, config.learner
    small, master = _BYTES[rollout.dtype], _BYTES[learner.dtype]
    longest = config.data.max_prompt_len + rollout.max_tokens
    kv_tokens = rollout.kv_tokens or rollout.max_running * longest
    tokens = max(learner.tokens_per_micro_batch, longest)
    weights = parameters * master
    shard = -(-weights // config.cluster.workers) if config.is_sharded else weights
    moments = -(-2 * weights // config.cluster.workers) if config.is_sharded else 2 * weights
    rows = min(tokens, max(1, MAX_LOGITS // shape.vocab_size))
    checkpointed = learner.gradient_checkpointing
    items = _learner_weights(config, shape, weights, shard, on_cpu=on_cpu)
    if config.speculation.drafter not in ("none", "history"):
        items["drafter"] = _drafter(config, shape)
    if on_cpu and rollout.dtype == "bfloat16":
        packed = parameters - (0 if shape.tied_embeddings else shape.vocab_size * shape.hidden_size)
        items["packed_matrices"] = Item(bytes=packed * small, why="oneDNN's layout")
    if learner.kl_coef > 0:
        items["reference_model"] = Item(bytes=shard, why=f"learner.kl_coef = {learner.kl_coef}")
    if config.cluster.workers > 1 < learner.mini_batches and not config.is_sharded:
        undo = weights + moments
        items["undo_of_a_step"] = Item(bytes=undo, why="several updates per step and workers")
    return Estimate(
        parameters=parameters,
        rollout_weights=Item(bytes=parameters * small, why=rollout.dtype),
        kv_cache=Item(bytes=kv_tokens * kv_bytes(shape, small), why=f"{kv_tokens} tokens"),
        gradients=Item(bytes=shard, why=learner.dtype),
        optimizer_moments=Item(bytes=moments, why="AdamW, two of them"),
        activations=Item(
            bytes=activation_bytes(shape, tokens, master, recompute=checkpointed),
            why=f"{tokens} tokens" + (", checkpointed" if checkpointed else ""),
        ),
        scores=Item(
            bytes=_SCORE_COPIES * rows * shape.vocab_size * master,
            why=f"{rows} x {shape.vocab_size}",
        ),
        **items,
    )


def _learner_weights(
    config: RunConfig, shape: ModelConfig, weights: int, shard: int, *, on_cpu: bool
) -> dict[str, Item]:
    """Return the learner's weights, the published copy, and the weights gathered from shards."""
    dtype, workers = config.learner.dtype, config.cluster.workers
    if not config.is_sharded:
        return {
            "master_weights": Item(bytes=weights, why=dtype),
            "published_weights": Item(bytes=weights, why="temporary copy"),
        }
    layers = shape.num_layers * _layer_parameters(shape) * _BYTES[dtype]
    passed = weights - layers + 2 * layers // shape.num_layers
    items = {
        "weight_shard": Item(bytes=shard, why=f"{dtype}, 1 of {workers}"),
        "gathered_weights": Item(bytes=2 * passed, why="ends, two layers, their gradients"),
    }
    if on_cpu:
        items["whole_weights"] = Item(bytes=2 * weights, why="gathered, and published")
    return items


def _drafter(config: RunConfig, shape: ModelConfig) -> Item:
    """Return what an EAGLE drafter takes: served, published, trained in float32, and its data.

    A drafter from outside may be smaller or larger; it is one layer of the target's shape.
    """
    layer = _layer_parameters(shape) + 4 * shape.hidden_size**2
    if config.spot.train == "never":
        return Item(bytes=2 * layer * _BYTES[config.rollout.dtype], why="one layer")
    kept = (config.spot.buffer_mb + config.spot.features_mb) * 2**20
    own, model = config.speculation.drafter, config.model.path
    if FRESH in own.split("+") or (own == AUTO and model != TINY_REASONER):
        rows = recipe_for(shape).fit_tokens
        kept += 3 * rows * shape.hidden_size * _BYTES[config.rollout.dtype]
    scores = 3 * min(MAX_LOGITS, config.spot.batch_tokens * shape.vocab_size)
    return Item(bytes=4 * (7 * layer + scores) + kept, why="one layer, its training and texts")


def kv_bytes(shape: ModelConfig, element: int) -> int:
    """Return the bytes of keys and values of one token."""
    return 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * element


def activation_bytes(shape: ModelConfig, tokens: int, element: int, *, recompute: bool) -> int:
    """Estimate the bytes that the decoder keeps for the backward pass of one micro-batch.

    A layer keeps its input, two normed and one middle residual (4 hidden), queries, keys and values
    before and after norm and rotation, the attention output before and after its layout change, and
    five times the width of the feed-forward (gate, up, silu(gate), their product, one more in
    flight). Checkpointed layers keep their input alone, except for the one being recomputed.
    """
    heads, kv_heads = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    rotated = (2 if shape.qk_norm else 1) * (heads + kv_heads)
    layer = 4 * shape.hidden_size + rotated + (heads + 2 * kv_heads) + 2 * heads
    layer += 5 * shape.intermediate_size
    kept = shape.num_layers * shape.hidden_size + layer if recompute else shape.num_layers * layer
    return tokens * element * (kept + 2 * shape.hidden_size)


def fitted(config: RunConfig, shape: ModelConfig, log: Callable[[str], None]) -> RunConfig:
    """Return the configuration, with less memory if it does not fit into that of a CPU.

    Lowers `learner.tokens_per_micro_batch`, then `rollout.max_running`, unless they were set. No
    text depends on them, and a gradient only by its rounding. Logs the new values.
    """
    device = torch.device(config.run.device if config.run.device != "auto" else _best_device())
    available = available_bytes(device) if device.type == "cpu" else None

    def fits(config: RunConfig) -> bool:
        needed = config.cluster.workers * estimate(config, shape, on_cpu=True).total
        return available is None or needed <= available

    lowered = []
    for section, field, least in _LOWERED:
        own = getattr(config, section)
        value = given = getattr(own, field)
        while field not in own.model_fields_set and not fits(config) and value >= 2 * least:
            value //= 2
            config = config.model_copy(update={section: own.model_copy(update={field: value})})
        if value != given:
            lowered.append(f"{section}.{field} = {value}")
    if lowered:
        log(f"memory: {' and '.join(lowered)}, to fit into what is free; set them to decide")
    return config


def report(config: RunConfig) -> str:
    """Return the table of a configuration as plain text."""
    device = torch.device(config.run.device if config.run.device != "auto" else _best_device())
    estimated = estimate(config, model_shape(config.model.path), on_cpu=device.type == "cpu")
    text = io.StringIO()
    Console(file=text, width=96).print(table(estimated, available_bytes(device), str(device)))
    return text.getvalue()


def available_bytes(device: torch.device) -> int | None:
    """Return the free bytes of a device; None if they are unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return machine.memory().available


def table(estimated: Estimate, available: int | None, device: str) -> Table:
    """Return an estimate as a table for the terminal, with the free memory."""
    grid = Table(title=f"memory, {estimated.parameters:,} parameters", title_justify="left")
    grid.add_column("use")
    grid.add_column("GB", justify="right")
    grid.add_column("details")
    for name, item in estimated.items.items():
        grid.add_row(_TITLES.get(name, name.replace("_", " ")), _gigabytes(item.bytes), item.why)
    grid.add_section()
    grid.add_row("total", _gigabytes(estimated.total), _verdict(estimated, available))
    grid.add_row("available", "?" if available is None else _gigabytes(available), device)
    return grid


def _verdict(estimated: Estimate, available: int | None) -> str:
    if available is None or estimated.total <= available:
        return ""
    if estimated.kv_cache.bytes == max(item.bytes for item in estimated.items.values()):
        return "does not fit; lower rollout.max_running, rollout.max_tokens or rollout.kv_tokens"
    return (
        "does not fit; lower learner.tokens_per_micro_batch, or set learner.gradient_checkpointing"
    )


def model_shape(path: str) -> ModelConfig:
    """Read the shape of `model.path`, without its weights."""
    return load_config(model_directory(path))


def _best_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.3f}"


def _layer_parameters(shape: ModelConfig) -> int:
    hidden, wide, dim = shape.hidden_size, shape.intermediate_size, shape.head_dim
    qkv, heads = (shape.num_heads + 2 * shape.num_kv_heads) * dim, shape.num_heads * dim
    matrices = hidden * qkv + heads * hidden + 3 * hidden * wide
    biases = shape.qkv_bias * qkv + shape.output_bias * hidden
    biases += shape.mlp_bias * (2 * wide + hidden)
    norms = 2 * hidden + (2 * dim if shape.qk_norm else 0)
    return matrices + biases + norms
