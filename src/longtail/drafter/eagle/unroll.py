"""The forward pass of EAGLE's training: unrolled on its own outputs, packed and windowed.

This is EAGLE-3's training-time test (Li et al. 2025). A row is a pair (feature at i, token i + 1)
of one sequence. Step 0 reads the target's features, as prefill does. Step s reads, instead of the
feature, the layer's own output of step s - 1 one row earlier: row i is then depth s + 1 of a draft
whose root pair is i - s, and attends to exactly the keys that it attends to in a draft:

    keys of step 0      rows i - W + 1 .. i - s       the context up to the root pair
    keys of step m      row i - s + m, m = 1 .. s     its ancestors and itself

    s = 2, W = 5, row 6:     rows    0   1   2   3   4   5   6
                             step 0          x   x   x
                             step 1                      x
                             step 2                          x

Every step is one pass over all rows, in packed order, without padding. The cost is linear in the
rows: queries go in chunks of W, and each attends to its own chunk and the one before. Without a
window, W is the length of the longest sequence.
A row i < s has no root pair; no row with a root pair reads it (`Pairs.exist`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from longtail.drafter.eagle.layer import EagleLayer, LayerOutput
from longtail.model.rope import Rotation
from longtail.types import PackedSequences

_MIN_CHUNK = 32
"""Least rows of a chunk: with smaller windows, tiny products are slower than masked ones."""
MAX_SCORES = 2**26
"""Most attention scores of a step that are kept for the backward pass; above, recomputed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """Pairs of packed sequences, in order; the last token of a sequence begins none.

    Example: sequences of lengths 4 and 2 have pairs at rows 0 1 2 | 4, positions 0 1 2 | 0; with
             prompts of 2 and 1 the pairs predict tokens 2 3 - | -, so `trained` is 1 1 0 | 0
    """

    rows: Int[Tensor, "pairs"]
    """Packed index of the feature's token; the embedding is the next token's."""
    positions: Int[Tensor, "pairs"]
    """Position of that token in its sequence."""
    trained: Bool[Tensor, "pairs"]
    """Whether the token after the pair exists and carries the loss."""
    chosen: Int[Tensor, "rows"]
    """Rows whose outputs are computed, in rising order; all, but after `for_loss`."""

    @staticmethod
    def of(packed: PackedSequences) -> "Pairs":
        """Return the pairs of packed sequences."""
        sequence = packed.sequence
        rows = (sequence[1:] == sequence[:-1]).nonzero()[:, 0]
        after = (rows + 2).clamp(max=packed.num_tokens - 1)
        inside = (rows + 2 < packed.num_tokens) & (sequence[after] == sequence[rows])
        return Pairs(
            rows=rows,
            positions=packed.positions[rows],
            trained=inside & (packed.loss_mask[after] > 0),
            chosen=torch.arange(len(rows), device=rows.device),
        )

    def for_loss(self, num_steps: int) -> "Pairs":
        """Choose the rows on whose outputs the loss of `num_steps` steps depends.

        The others, most of a prompt, only provide keys and values to attend to.

        Example: with `trained` at row 5 of 0 .. 6, two steps depend on the outputs of rows 4 and 5
        """
        needed = self.trained.clone()
        for step in range(1, min(num_steps, len(needed))):
            needed[:-step] |= self.trained[step:]
        return replace(self, chosen=needed.nonzero()[:, 0])

    def exist(self, step: int) -> Bool[Tensor, "pairs"]:
        """Return the rows whose root pair at `step` lies in the same sequence."""
        return self.positions >= step


def unroll(
    layer: EagleLayer,
    features: Float[Tensor, "pairs features"],
    embeddings: Float[Tensor, "pairs hidden"],
    pairs: Pairs,
    num_steps: int,
) -> tuple[LayerOutput, ...]:
    """Run the layer `num_steps` times over all pairs; the output of step s at row i predicts i + 2.

    `features` are the target's at `pairs.rows`, `embeddings` those of the next tokens. Outputs are
    those of the rows `pairs.chosen`.
    """
    rotation = layer.rotation(pairs.positions)
    fused = layer.fuse_features(features).to(features.dtype)  # not autocast's dtype
    stream, attended = layer.make_input(fused, embeddings)
    heads = layer.heads(attended, rotation)
    context = _Context(heads.keys, heads.values, pairs, layer.config.window)

    def take(x: Tensor) -> Tensor:
        return x.index_select(0, pairs.chosen)

    def put(x: Tensor) -> Tensor:
        """Return a tensor of all rows, with zeros in those that are not chosen."""
        return x.new_zeros(len(features), *x.shape[1:]).index_copy(0, pairs.chosen, x)

    embeddings = take(embeddings)
    rotation = Rotation(cos=take(rotation.cos), sin=take(rotation.sin))
    outputs = [layer.finish(take(stream), take(context.attend(heads.queries, [])))]
    path: list[tuple[Tensor, Tensor]] = []
    for _ in range(num_steps - 1):
        # Before the first of adjacent chosen rows lies another row: no loss depends on its output.
        stream, attended = layer.make_input(_down(outputs[-1].feature, 1), embeddings)
        queries, keys, values = layer.heads(attended, rotation)
        path.append((put(keys), put(values)))
        outputs.append(layer.finish(stream, take(context.attend(put(queries), path))))
    return tuple(outputs)


def _down(x: Tensor, by: int) -> Tensor:
    """Shift rows down by `by`, with zeros at the top."""
    by = min(by, x.shape[0])
    return torch.cat((x.new_zeros(by, *x.shape[1:]), x[: x.shape[0] - by])) if by else x


@final
class _Context:
    """Keys and values of step 0, in the layout that queries of every step read."""

    def __init__(self, keys: Tensor, values: Tensor, pairs: Pairs, window: int) -> None:
        self._positions = pairs.positions
        self._window = window or 1 + int(pairs.positions.max())
        self._chunk = max(self._window, _MIN_CHUNK)
        self._keys, self._values = self._with_chunk_before(keys), self._with_chunk_before(values)

    def attend(
        self, queries: Float[Tensor, "pairs heads head_dim"], path: Sequence[tuple[Tensor, Tensor]]
    ) -> Float[Tensor, "pairs heads head_dim"]:
        """Attend from step len(path) to this context and to the path, in one softmax.

        The path has keys and values of the steps after 0, each at its own rows.
        """
        rows, heads, dim = queries.shape
        grouped = queries.view(rows, self._keys.shape[-2], -1, dim)  # [pairs, kv_heads, group, dim]
        step = len(path)
        shifts = [(kept, step - 1 - m) for m, kept in enumerate(path)]
        shifts = [(kept, by) for kept, by in shifts if by < self._window]
        keys = [_down(kept[0], by) for kept, by in shifts]
        values = [_down(kept[1], by) for kept, by in shifts]
        band, attend = self._band(step), _attend
        if band.numel() * heads > MAX_SCORES and torch.is_grad_enabled():
            attend = partial(checkpoint, _attend, use_reentrant=False)
        out = attend(
            self._chunked(grouped), self._keys, self._values, band,
            [self._chunked(k) for k in keys], [self._chunked(v) for v in values],
        )  # fmt: skip
        return out.flatten(0, 1)[:rows].reshape(rows, heads, dim)

    def _chunked(self, x: Tensor) -> Tensor:
        """Reshape [pairs, ...] to [chunks, chunk, ...], the last chunk padded with zeros."""
        missing = -x.shape[0] % self._chunk
        whole = torch.cat((x, x.new_zeros(missing, *x.shape[1:]))) if missing else x
        return whole.view(-1, self._chunk, *x.shape[1:])

    def _with_chunk_before(self, x: Tensor) -> Tensor:
        chunks = self._chunked(x)
        return torch.cat((_down(chunks, 1), chunks), 1)  # [chunks, 2 chunk, kv_heads, head_dim]

    def _band(self, step: int) -> Bool[Tensor, "chunks queries keys"]:
        """Return the mask of keys of step 0: at least `step` rows back, in window and sequence.

        A key d rows back is in the query's sequence if and only if the query's position is >= d.
        """
        chunk, device = self._chunk, self._positions.device
        back = torch.arange(chunk, device=device)[:, None] + chunk
        back = back - torch.arange(2 * chunk, device=device)  # [queries, keys]
        visible = (back >= step) & (back < self._window)
        return visible & (back <= self._chunked(self._positions)[:, :, None])


def _attend(
    queries: Float[Tensor, "blocks queries kv_heads group head_dim"],
    keys: Float[Tensor, "blocks keys kv_heads head_dim"],
    values: Float[Tensor, "blocks keys kv_heads head_dim"],
    visible: Bool[Tensor, "blocks queries keys"],
    path_keys: list[Tensor],
    path_values: list[Tensor],
) -> Float[Tensor, "blocks queries kv_heads group head_dim"]:
    """Attend with one softmax over a block's visible keys and each query's own path."""
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
