"""How much memory a run will take, by arithmetic on the model's shape; no weight is loaded.

Every term is an upper bound at its own moment; the sum is what to have, not what is always used.
The table is printed by `longtail train --dry-run`.

    weights that generate    parameters x rollout.dtype    (+ oneDNN's packed copies, bfloat16 CPU)
    KV cache                 2 x layers x kv heads x head_dim x tokens x rollout.dtype
    master weights, gradients, AdamW's two moments     4 x parameters x learner.dtype
                             (of shards, a worker's part of them)
    activations              one micro-batch, kept for the backward pass
    scores                   rows x vocabulary, bounded by `rl.logprobs.MAX_LOGITS`
"""

import io
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

from longtail.config.rl import RunConfig
from longtail.model.hf.model import load_config
from longtail.model.transformer import ModelConfig
from longtail.rl.logprobs import MAX_LOGITS
from longtail.system import machine

_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}
_MADE_LATER = ("optimizer moments", "reference model")
_SCORE_COPIES = 4
"""Logits, log-probabilities, their exponentials and one gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One thing that takes memory.

    Example: Item(name="KV cache", bytes=83_886_080, why="64 x 2560 tokens, float32")
    """

    name: str
    bytes: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """All of a run's memory on its device."""

    parameters: int
    items: tuple[Item, ...]

    @property
    def total(self) -> int:
        """Sum in bytes."""
        return sum(item.bytes for item in self.items)

    @property
    def made_later(self) -> int:
        """Bytes that stay once learning has begun; a KV cache that lends its memory leaves them."""
        return sum(item.bytes for item in self.items if item.name in _MADE_LATER)


def count_parameters(shape: ModelConfig) -> int:
    """Count the weights of a decoder of this shape; a tied head is counted once."""
    embeddings = shape.vocab_size * shape.hidden_size * (1 if shape.tied_embeddings else 2)
    return embeddings + shape.num_layers * _layer_parameters(shape) + shape.hidden_size


def estimate(config: RunConfig, shape: ModelConfig, *, on_cpu: bool = False) -> Estimate:
    """Add up what `longtail train` will hold at the same time.

    `on_cpu` counts what lies in main memory: the second copy of bfloat16 matrices, which only a CPU
    keeps while generating, and the whole weights that are gathered from shards.
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
    items = [
        Item(name="rollout weights", bytes=parameters * small, why=rollout.dtype),
        Item(name="KV cache", bytes=kv_tokens * kv_bytes(shape, small), why=f"{kv_tokens} tokens"),
        Item(name="gradients", bytes=shard, why=learner.dtype),
        Item(name="optimizer moments", bytes=moments, why="AdamW, two of them"),
        Item(
            name="activations",
            bytes=activation_bytes(shape, tokens, master, recompute=learner.gradient_checkpointing),
            why=f"{tokens} tokens" + (", checkpointed" if learner.gradient_checkpointing else ""),
        ),
        Item(
            name="scores",
            bytes=_SCORE_COPIES * rows * shape.vocab_size * master,
            why=f"{rows} x {shape.vocab_size}",
        ),
    ]
    items[2:2] = _whole_and_shards(config, shape, weights, shard, on_cpu=on_cpu)
    if on_cpu and rollout.dtype == "bfloat16":
        packed = parameters - (0 if shape.tied_embeddings else shape.vocab_size * shape.hidden_size)
        items.insert(1, Item(name="packed matrices", bytes=packed * small, why="oneDNN's layout"))
    if learner.kl_coef > 0:
        why = f"learner.kl_coef = {learner.kl_coef}"
        items.append(Item(name="reference model", bytes=shard, why=why))
    if config.cluster.workers > 1 < learner.mini_batches and not config.is_sharded:
        undo = weights + moments
        items.append(Item(name="undo of a step", bytes=undo, why="of several updates, in a team"))
    return Estimate(parameters=parameters, items=tuple(items))


def _whole_and_shards(
    config: RunConfig, shape: ModelConfig, weights: int, shard: int, *, on_cpu: bool
) -> list[Item]:
    """Count the learner's weights, the copy that is published, and what passes gather of shards."""
    dtype, workers = config.learner.dtype, config.cluster.workers
    if not config.is_sharded:
        return [
            Item(name="master weights", bytes=weights, why=dtype),
            Item(name="published weights", bytes=weights, why="a copy in passing"),
        ]
    layers = shape.num_layers * _layer_parameters(shape) * _BYTES[dtype]
    passed = weights - layers + 2 * layers // shape.num_layers
    items = [
        Item(name="weight shard", bytes=shard, why=f"{dtype}, 1 of {workers}"),
        Item(name="gathered weights", bytes=2 * passed, why="ends, two layers, their gradients"),
    ]
    if on_cpu:
        items.append(Item(name="whole weights", bytes=2 * weights, why="gathered, and published"))
    return items


def kv_bytes(shape: ModelConfig, element: int) -> int:
    """Return the bytes of keys and values of one token."""
    return 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * element


def activation_bytes(shape: ModelConfig, tokens: int, element: int, *, recompute: bool) -> int:
    """Estimate what the decoder keeps for its backward pass over one micro-batch.

    A layer keeps its input, two normed and one middle residual (4 hidden), queries, keys and values
    before and after norm and rotation, what was attended, before and after its layout changes, and
    five times the width of the feed-forward (gate, up, silu(gate), their product, one more in
    flight). Checkpointed layers keep their input alone, but for the one being recomputed.
    """
    heads, kv_heads = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    rotated = (2 if shape.qk_norm else 1) * (heads + kv_heads)
    layer = 4 * shape.hidden_size + rotated + (heads + 2 * kv_heads) + 2 * heads
    layer += 5 * shape.intermediate_size
    kept = shape.num_layers * shape.hidden_size + layer if recompute else shape.num_layers * layer
    return tokens * element * (kept + 2 * shape.hidden_size)


def report(config: RunConfig) -> str:
    """Read the shape of the model that a run names, and return the table as plain text."""
    device = torch.device(config.run.device if config.run.device != "auto" else _best_device())
    estimated = estimate(config, _shape(config.model.path), on_cpu=device.type == "cpu")
    text = io.StringIO()
    Console(file=text, width=96).print(table(estimated, available_bytes(device), str(device)))
    return text.getvalue()


def available_bytes(device: torch.device) -> int | None:
    """Return what is free on a device now; None where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return machine.memory().available


def table(estimated: Estimate, available: int | None, device: str) -> Table:
    """Lay an estimate out for the terminal, with what there is beside it."""
    grid = Table(title=f"memory, {estimated.parameters:,} parameters", title_justify="left")
    grid.add_column("what")
    grid.add_column("GB", justify="right")
    grid.add_column("of")
    for item in estimated.items:
        grid.add_row(item.name, _gigabytes(item.bytes), item.why)
    grid.add_section()
    grid.add_row("total", _gigabytes(estimated.total), _verdict(estimated, available))
    grid.add_row("available", "?" if available is None else _gigabytes(available), device)
    return grid


def _verdict(estimated: Estimate, available: int | None) -> str:
    if available is None or estimated.total <= available:
        return ""
    remedies = {
        "KV cache": "rollout.max_running, rollout.max_tokens or rollout.kv_tokens",
        "activations": "learner.tokens_per_micro_batch, or set learner.gradient_checkpointing",
    }
    largest = max(estimated.items, key=lambda item: item.bytes).name
    return f"does not fit; lower {remedies.get(largest, remedies['activations'])}"


def _shape(path: str) -> ModelConfig:
    if path == "tiny-reasoner":
        from longtail import tiny

        return tiny.model_config()
    return load_config(path)


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
