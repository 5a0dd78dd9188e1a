"""Attention of a flat batch over a contiguous KV cache, without a gather.

Requests that decode one token are one batched product over neighbouring rows, each masked to its own
length. A row much longer than the others would stretch that rectangle, so `plan_rows` takes such
rows, and every prefill chunk, out and gives each a call of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor

from longtail.engine.batch import Segment
from longtail.model.attention import Attention, causal_window_mask

CALL_COST = 250
"""One more attention call costs about as much as reading so many tokens of one row (measured)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCall:
    """One request attended on its own: flat tokens [start, start + num_tokens), one row."""

    row: int
    start: int
    num_tokens: int
    num_keys: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPlan:
    """How one step attends.

    Rows [0, num_batched) decode in one call over `batched_keys` keys; some of them may be absent
    (`decode_tokens` lists the flat token of each decoding request, `decode_rows` its row).
    """

    rows: tuple[int, ...]
    """Row of every flat token."""
    slots: tuple[int, ...]
    """Place in its row of every flat token."""
    num_batched: int
    batched_keys: int
    decode_tokens: tuple[int, ...]
    decode_rows: tuple[int, ...]
    decode_keys: tuple[int, ...]
    calls: tuple[RowCall, ...]

    @property
    def is_plain_decode(self) -> bool:
        """Every flat token decodes, token i in row i, all in the one batched call."""
        return not self.calls and self.decode_rows == tuple(range(len(self.rows)))


def _num_alone(keys_descending: Sequence[int], span: int) -> int:
    """How many of the longest rows to attend alone, so that the fewest tokens are read."""
    best, best_cost = 0, span * keys_descending[0] if keys_descending else 0
    alone_cost = 0
    for count, keys in enumerate(keys_descending, 1):
        alone_cost += keys + CALL_COST
        rest = keys_descending[count] if count < len(keys_descending) else 0
        cost = alone_cost + span * rest
        if cost < best_cost:
            best, best_cost = count, cost
    return best


def plan_rows(segments: Sequence[Segment], rows: Sequence[int]) -> RowPlan:
    """Decide which requests share the batched call.

    Example: rows 0..3 decode at lengths 300, 310, 2000, 290: row 2 goes alone, 4 x 310 is batched.
    """
    token_rows: list[int] = []
    slots: list[int] = []
    decoding: list[RowCall] = []
    calls: list[RowCall] = []
    for segment, row in zip(segments, rows, strict=True):
        n = segment.num_tokens
        call = RowCall(
            row=row, start=len(token_rows), num_tokens=n, num_keys=segment.num_context + n
        )
        (decoding if n == 1 else calls).append(call)
        token_rows += [row] * n
        slots += range(segment.num_context, segment.num_context + n)
    decoding.sort(key=lambda call: -call.num_keys)
    span = max((call.row for call in decoding), default=-1) + 1
    alone = _num_alone([call.num_keys for call in decoding], span)
    calls += decoding[:alone]
    batched = sorted(decoding[alone:], key=lambda call: call.row)
    return RowPlan(
        rows=tuple(token_rows),
        slots=tuple(slots),
        num_batched=max((call.row for call in batched), default=-1) + 1,
        batched_keys=max((call.num_keys for call in batched), default=0),
        decode_tokens=tuple(call.start for call in batched),
        decode_rows=tuple(call.row for call in batched),
        decode_keys=tuple(call.num_keys for call in batched),
        calls=tuple(calls),
    )


@final
class RowAttention(Attention):
    """Stores a step's keys and values in their rows and attends by plan."""

    def __init__(
        self,
        storage: Shaped[Tensor, "layers 2 rows row_len kv_heads head_dim"],
        plan: RowPlan,
    ) -> None:
        self._storage, self._plan = storage, plan
        device, row_len = storage.device, storage.shape[3]
        flat = [row * row_len + slot for row, slot in zip(plan.rows, plan.slots, strict=True)]
        self._slots = torch.tensor(flat, device=device)
        self._tokens = torch.tensor(plan.decode_tokens, dtype=torch.int64, device=device)
        self._rows = torch.tensor(plan.decode_rows, dtype=torch.int64, device=device)
        self._decode_masks: dict[int, Tensor | None] = {}
        self._call_masks: dict[tuple[int, int, int], Tensor] = {}

    def attend(
        self,
        layer: int,
        queries: Float[Tensor, "tokens heads head_dim"],
        keys: Float[Tensor, "tokens kv_heads head_dim"],
        values: Float[Tensor, "tokens kv_heads head_dim"],
        window: int,
    ) -> Float[Tensor, "tokens heads head_dim"]:
        """Store, then attend: the batched rows in one call, the others one by one."""
        plan = self._plan
        cached_keys, cached_values = self._storage[layer].unbind(0)
        cached_keys.flatten(0, 1).index_copy_(0, self._slots, keys)
        cached_values.flatten(0, 1).index_copy_(0, self._slots, values)
        if plan.is_plain_decode:
            return self._attend_batched(queries, cached_keys, cached_values, window)
        attended = torch.empty_like(queries)
        if plan.num_batched:
            padded = queries.new_zeros(plan.num_batched, *queries.shape[1:])
            padded[self._rows] = queries[self._tokens]
            out = self._attend_batched(padded, cached_keys, cached_values, window)
            attended[self._tokens] = out[self._rows]
        for call in plan.calls:
            part = slice(call.start, call.start + call.num_tokens)
            attended[part] = self._attend_alone(
                queries[part],
                cached_keys[call.row, : call.num_keys],
                cached_values[call.row, : call.num_keys],
                window,
            )
        return attended

    def _attend_batched(
        self, queries: Tensor, keys: Tensor, values: Tensor, window: int
    ) -> Float[Tensor, "rows heads head_dim"]:
        """One query a row, rows [0, num_batched)."""
        if window not in self._decode_masks:
            self._decode_masks[window] = self._decode_mask(window, queries.dtype)
        mask = self._decode_masks[window]
        rows, num_keys = self._plan.num_batched, self._plan.batched_keys
        keys = keys[:rows, :num_keys].transpose(1, 2)
        values = values[:rows, :num_keys].transpose(1, 2)
        if queries.dtype == torch.bfloat16:
            out = F.scaled_dot_product_attention(
                queries[:, :, None], keys, values, attn_mask=mask, enable_gqa=True
            )
            return out[:, :, 0]
        # The heads of a group as queries of their one key head: the same sums, and in float32
        # up to 1.5x faster than enable_gqa (in bfloat16 slower).
        grouped = queries.view(rows, keys.shape[1], -1, queries.shape[-1])
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
        return out.reshape(queries.shape)

    def _decode_mask(self, window: int, dtype: torch.dtype) -> Tensor | None:
        """Additive mask [rows, 1, 1, keys]; None when every row sees all keys."""
        plan = self._plan
        full = all(keys == plan.batched_keys for keys in plan.decode_keys)
        if (
            full
            and len(plan.decode_keys) == plan.num_batched
            and not 0 < window < plan.batched_keys
        ):
            return None
        lengths = [1] * plan.num_batched  # an absent row sees one (stored) key: no empty softmax
        for row, keys in zip(plan.decode_rows, plan.decode_keys, strict=True):
            lengths[row] = keys
        ends = torch.tensor(lengths, device=self._storage.device)[:, None]
        slots = torch.arange(plan.batched_keys, device=self._storage.device)
        hidden = slots >= ends
        if window:
            hidden |= slots < ends - window
        mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
        return mask.masked_fill_(hidden, float("-inf"))[:, None, None]

    def _attend_alone(
        self, queries: Tensor, keys: Tensor, values: Tensor, window: int
    ) -> Float[Tensor, "tokens heads head_dim"]:
        """The last queries of one request over all its keys."""
        num_queries, num_keys = queries.shape[0], keys.shape[0]
        mask = None
        if num_queries > 1 or 0 < window < num_keys:
            key = (num_queries, num_keys, window)
            if key not in self._call_masks:
                self._call_masks[key] = causal_window_mask(*key, queries.device)
            mask = self._call_masks[key]
        out = F.scaled_dot_product_attention(
            queries.transpose(0, 1)[None],
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            attn_mask=mask,
            enable_gqa=queries.shape[1] != keys.shape[1],
        )
        return out[0].transpose(0, 1)
