"""The drafter's forward pass in training: packed, windowed, and unrolled on its own outputs.

A row is a pair (feature at i, token i + 1) of one sequence. Step 0 sees the target's features, as
the context of a draft does. Step s sees, in the place of the feature, the layer's own output of
step s - 1 one row earlier: row i is then depth s + 1 of a draft whose root pair is i - s, and what
it attends to is exactly what it attends to in a draft:

    keys of step 0      rows i - W + 1 .. i - s       the context up to the root pair
    keys of step m      row i - s + m, m = 1 .. s     its own path, itself last

    s = 2, W = 5, row 6:     rows    0   1   2   3   4   5   6
                             step 0          x   x   x
                             step 1                      x
                             step 2                          x

Every step is one pass over all rows, in the packed order; nothing is padded. With a window the cost
is linear in the rows: queries go in chunks of W, each sees its own chunk and the one before. A row
of step s < i has no root and holds nothing that a row with a root ever reads; `Pairs.exist` tells.
"""

import itertools
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from longtail.drafter.eagle.layer import EagleLayer, LayerOutput
from longtail.types import PackedSequences

_MIN_CHUNK = 32
"""Smaller windows share a chunk: tiny products are slower than masked ones."""
_MAX_SCORES = 2**26
"""Attention scores of a step above which they are computed again in the backward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """The pairs of packed sequences, in order; the last token of a sequence has none.

    Example: sequences of lengths 4 and 2 have pairs at rows 0 1 2 | 4, positions 0 1 2 | 0,
             cu_pairs 0, 3, 4; with prompts of 2 and 1 the first predicts tokens 2 3 - | -,
             so `learned` is 1 1 0 | 0
    """

    rows: Int[Tensor, "pairs"]
    """Token whose feature it is; the next token's embedding goes with it."""
    positions: Int[Tensor, "pairs"]
    """Of that token in its sequence."""
    cu_pairs: tuple[int, ...]
    learned: Bool[Tensor, "pairs"]
    """Whether the token after the pair is there and carries the loss."""

    @staticmethod
    def of(packed: PackedSequences) -> "Pairs":
        """List the pairs of packed sequences."""
        sequence = packed.sequence
        rows = (sequence[1:] == sequence[:-1]).nonzero()[:, 0]
        after = (rows + 2).clamp(max=packed.num_tokens - 1)
        inside = (rows + 2 < packed.num_tokens) & (sequence[after] == sequence[rows])
        lengths = (max(end - start - 1, 0) for start, end in itertools.pairwise(packed.cu_seqlens))
        return Pairs(
            rows=rows,
            positions=packed.positions[rows],
            cu_pairs=(0, *itertools.accumulate(lengths)),
            learned=inside & (packed.loss_mask[after] > 0),
        )

    def exist(self, step: int) -> Bool[Tensor, "pairs"]:
        """Tell at which rows a draft can have reached `step`: its root pair is in the sequence."""
        return self.positions >= step


def unroll(
    layer: EagleLayer,
    features: Float[Tensor, "pairs features"],
    embeddings: Float[Tensor, "pairs hidden"],
    pairs: Pairs,
    num_steps: int,
) -> tuple[LayerOutput, ...]:
    """Run the layer `num_steps` times over all pairs; the output of step s at row i predicts i + 2.

    `features` are the target's at `pairs.rows`, `embeddings` those of the tokens one further.
    """
    rotation = layer.rotation(pairs.positions)
    entering = layer.fuse_features(features).to(features.dtype)  # autocast is for products
    outputs: list[LayerOutput] = []
    context: _Context | None = None
    path = _Path()
    for _ in range(num_steps):
        if outputs:
            entering = _down(outputs[-1].feature, 1)
        inputs = layer.make_input(entering, embeddings)
        heads = layer.heads(inputs.attended, rotation)
        if context is None:
            context = _Context(heads.keys, heads.values, pairs, layer.config.window)
        else:
            path = path.extended(heads.keys, heads.values)
        outputs.append(layer.finish(inputs.stream, context.attend(heads.queries, path)))
    return tuple(outputs)


def _down(x: Tensor, by: int) -> Tensor:
    """Move rows down, so that a row holds what was `by` rows above it; zeros come in."""
    by = min(by, x.shape[0])
    return torch.cat((x.new_zeros(by, *x.shape[1:]), x[: x.shape[0] - by])) if by else x


@dataclass(frozen=True, slots=True)
class _Path:
    """Keys and values of the steps after 0, in the order of steps, each at its own rows."""

    keys: tuple[Tensor, ...] = ()
    values: tuple[Tensor, ...] = ()

    def extended(self, keys: Tensor, values: Tensor) -> "_Path":
        return _Path((*self.keys, keys), (*self.values, values))

    def seen(self, window: int) -> tuple[list[Tensor], list[Tensor]]:
        """Bring what a row of the last step sees of its path into that row."""
        steps = len(self.keys)
        shifts = [(m, steps - 1 - m) for m in range(steps) if not window or steps - 1 - m < window]
        return (
            [_down(self.keys[m], by) for m, by in shifts],
            [_down(self.values[m], by) for m, by in shifts],
        )


@final
class _Context:
    """Keys and values of step 0, laid out for queries of any step."""

    def __init__(self, keys: Tensor, values: Tensor, pairs: Pairs, window: int) -> None:
        self._window, self._positions = window, pairs.positions
        self._chunk = max(window, _MIN_CHUNK)
        self._cuts = list(itertools.pairwise(pairs.cu_pairs))
        if window:
            keys, values = self._with_chunk_before(keys), self._with_chunk_before(values)
        self._keys, self._values = keys, values

    def attend(
        self, queries: Float[Tensor, "pairs heads head_dim"], path: _Path
    ) -> Float[Tensor, "pairs heads head_dim"]:
        """Attend from step len(path) to this context and to the path, in one softmax."""
        rows, heads, dim = queries.shape
        grouped = queries.view(rows, self._keys.shape[-2], -1, dim)  # heads of a key head together
        keys, values = path.seen(self._window)
        step = len(path.keys)
        if self._window:
            local = self._chunked(grouped)
            out = _attend(
                local, self._keys, self._values, self._band(step),
                [self._chunked(k) for k in keys], [self._chunked(v) for v in values],
            )  # fmt: skip
            return out.flatten(0, 1)[:rows].reshape(rows, heads, dim)
        parts = [
            _attend(
                grouped[None, a:b], self._keys[None, a:b], self._values[None, a:b],
                _causal(b - a, step, queries.device),
                [k[None, a:b] for k in keys], [v[None, a:b] for v in values],
            )[0]
            for a, b in self._cuts if b > a
        ]  # fmt: skip
        return torch.cat(parts).reshape(rows, heads, dim)

    def _chunked(self, x: Tensor) -> Tensor:
        """[pairs, ...] -> [chunks, chunk, ...], the last one filled up with zeros."""
        missing = -x.shape[0] % self._chunk
        whole = torch.cat((x, x.new_zeros(missing, *x.shape[1:]))) if missing else x
        return whole.view(-1, self._chunk, *x.shape[1:])

    def _with_chunk_before(self, x: Tensor) -> Tensor:
        chunks = self._chunked(x)
        return torch.cat((_down(chunks, 1), chunks), 1)  # [chunks, 2 chunk, kv_heads, head_dim]

    def _band(self, step: int) -> Bool[Tensor, "chunks queries keys"]:
        """Where a key of step 0 is visible: `step` rows back or more, in the window, in sequence.

        A key d rows back is in the query's sequence just if the query's position is at least d.
        """
        chunk, device = self._chunk, self._positions.device
        back = torch.arange(chunk, device=device)[:, None] + chunk
        back = back - torch.arange(2 * chunk, device=device)  # [queries, keys]
        visible = (back >= step) & (back < self._window)
        return visible & (back <= self._chunked(self._positions)[:, :, None])


def _causal(length: int, step: int, device: torch.device) -> Bool[Tensor, "1 length length"]:
    rows = torch.arange(length, device=device)
    return (rows[:, None] - rows >= step)[None]


def _attend(
    queries: Float[Tensor, "blocks queries kv_heads group head_dim"],
    keys: Float[Tensor, "blocks keys kv_heads head_dim"],
    values: Float[Tensor, "blocks keys kv_heads head_dim"],
    visible: Bool[Tensor, "blocks queries keys"],
    path_keys: list[Tensor],
    path_values: list[Tensor],
) -> Float[Tensor, "blocks queries kv_heads group head_dim"]:
    """One softmax over the visible keys of a block and, for each query, keys of its own."""
    count = visible.numel() * queries.shape[2] * queries.shape[3]
    inputs = (queries, keys, values, visible, path_keys, path_values)
    if count > _MAX_SCORES and torch.is_grad_enabled():
        return checkpoint(_attend_now, *inputs, use_reentrant=False)
    return _attend_now(*inputs)


def _attend_now(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    path_keys: list[Tensor],
    path_values: list[Tensor],
) -> Tensor:
    queries = queries * queries.shape[-1] ** -0.5
    grouped = queries.permute(0, 2, 3, 1, 4)  # [blocks, kv_heads, group, queries, head_dim]
    blocks, kv_heads, group, length, dim = grouped.shape
    flat = grouped.reshape(blocks, kv_heads, group * length, dim)
    scores = (flat @ keys.permute(0, 2, 3, 1)).view(blocks, kv_heads, group, length, -1)
    scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
    own = [(queries * k[:, :, :, None]).sum(-1).permute(0, 2, 3, 1)[..., None] for k in path_keys]
    weights = torch.cat((scores, *own), -1).softmax(-1)
    shared, *single = weights.split_with_sizes([scores.shape[-1]] + [1] * len(own), -1)
    shared = shared.reshape(blocks, kv_heads, group * length, -1)
    out = (shared @ values.transpose(1, 2)).view(grouped.shape).permute(0, 3, 1, 2, 4)
    for weight, value in zip(single, path_values, strict=True):
        out = out + weight.permute(0, 3, 1, 2, 4) * value[:, :, :, None]
    return out
