"""Attention over pages in Triton: ragged queries, drafts, grouped heads.

A program attends a tile of consecutive tokens of one request, with all query heads of one key
head, to the keys that they see, in tiles of `_KEYS` keys, in order. Keys that all tokens of a tile
see are read once; for the others (the end of a text, a draft's branches) each token is processed
alone.

    tile of three tokens, _KEYS = 4       slots  0 1 2 3 | 4 5 6 7 | 8 9 10
      text token, sees 9                         shared    shared    8
      node 1, its child                          shared    shared    8 9
      node 2, another child                      shared    shared    8 10    <- picked, in order

A ROW'S BITS DO NOT DEPEND ON ITS BATCH, as with the native kernels: keys are numbered in the order
in which the row sees them, tiles and splits begin at fixed numbers, every tile goes through the
same `_fold` in the same shape, and a tile in which a row sees no key leaves the row unchanged. So a
drafted token has the bits that it has without drafting. Long texts are cut into splits of `_SPLIT`
keys, which are joined in order. Long tiles (prefill) are larger and are not split.
"""

from typing import final, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Int
from torch import Tensor

from longtail.model.attention import Heads, KVHeads
from longtail.model.kernels.ops import Indices, Places
from longtail.model.kernels.pages import PageKernels, Pages, Tiles
from longtail.speculation.tree import MAX_NODES

_KEYS = 32
_SPLIT = 512
_NO_SPLIT = 2**30
_ROWS, _LONG_ROWS = 32, 64
"""Rows of a tile; a row is one query head of one token."""
_PROGRAMS = 512
"""Number of programs up to which splits have programs of their own: a few per multiprocessor."""
_LOG2_E = 1.4426950408889634


@triton.jit
@no_type_check
def _store(keys, values, key_pages, value_pages, addresses, key_stride, value_stride,
           SIZE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Store one token's key and value."""
    token, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = at < SIZE
    to = tl.load(addresses + token).to(tl.int64) * SIZE + at
    key = tl.load(keys + token * key_stride + at, mask=inside)
    value = tl.load(values + token * value_stride + at, mask=inside)
    tl.store(key_pages + to, key, mask=inside)
    tl.store(value_pages + to, value, mask=inside)


@triton.jit
@no_type_check
def _load(pages, page, slots, inside, kv_head, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
          WIDTH: tl.constexpr, PAGE: tl.constexpr):  # fmt: skip
    """Load a key head's vectors at slots of one page, or of one page each; 0 if not `inside`."""
    dims = tl.arange(0, WIDTH)
    at = ((page.to(tl.int64) * PAGE + slots % PAGE) * KV_HEADS + kv_head) * DIM
    mask = inside[:, None] & (dims < DIM)[None, :]
    return tl.load(pages + at[:, None] + dims[None, :], mask=mask, other=0.0)


@triton.jit
@no_type_check
def _fold(q, k, v, visible, scale, top, total, out, PRODUCT: tl.constexpr):
    """Add one tile of keys to the running softmax of every row, in base 2."""
    scores = tl.dot(q.to(PRODUCT), tl.trans(k.to(PRODUCT)), input_precision="ieee") * scale
    scores = tl.where(visible, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)  # no key so far: avoids inf - inf
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(top - base)
    total = total * shrink + tl.sum(weights, 1)
    weights = weights.to(v.dtype).to(PRODUCT)
    out = out * shrink[:, None] + tl.dot(weights, v.to(PRODUCT), input_precision="ieee")
    return higher, total, out


@triton.jit
@no_type_check
def _fold_apart(q, keys, values, table, contexts, depths, picked, first, size, number, start, stop,
                window, kv_head, scale, top, total, out, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
                WIDTH: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr, NODES: tl.constexpr,
                PRODUCT: tl.constexpr):  # fmt: skip
    """Fold the keys numbered [start, stop) of each token of a tile, token by token."""
    for one in range(size):
        text = tl.load(contexts + first + one).to(tl.int32)
        last = text + tl.load(depths + first + one).to(tl.int32)
        low = tl.where(window > 0, tl.maximum(last - window, 0), 0)
        begin = tl.maximum(start, low // KEYS * KEYS)
        for at in range(begin, tl.minimum(stop, last), KEYS):
            place = at + tl.arange(0, KEYS)  # in the order in which the token sees them
            inside = place < last
            node = picked + (first + one) * NODES + place - text
            behind = text + tl.load(node, mask=inside & (place >= text), other=0)
            slots = tl.where(place < text, place, behind)
            page = tl.load(table + slots // PAGE, mask=inside, other=0)
            k = _load(keys, page, slots, inside, kv_head, KV_HEADS, DIM, WIDTH, PAGE)
            v = _load(values, page, slots, inside, kv_head, KV_HEADS, DIM, WIDTH, PAGE)
            visible = (number == one)[:, None] & (inside & (place >= low))[None, :]
            top, total, out = _fold(q, k, v, visible, scale, top, total, out, PRODUCT)
    return top, total, out


@triton.jit
@no_type_check
def _attend(queries, keys, values, tables, rows, contexts, depths, picked, firsts, sizes, out,
            stats, query_stride, row_pages, scale, window, KV_HEADS: tl.constexpr,
            GROUP: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr,
            LANES: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr,
            SPLITS: tl.constexpr, NODES: tl.constexpr, DRAFTS: tl.constexpr,
            PRODUCT: tl.constexpr):  # fmt: skip
    """Attend one tile of tokens under one key head, in every `num_programs(2)`-th split."""
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    size = tl.load(sizes + tile).to(tl.int32)
    if size == 0:
        return
    first = tl.load(firsts + tile).to(tl.int32)
    table = tables + tl.load(rows + first) * row_pages
    number, lane = tl.arange(0, ROWS) // LANES, tl.arange(0, ROWS) % LANES
    dims = tl.arange(0, WIDTH)
    real = (number < size) & (lane < GROUP)
    mask = real[:, None] & (dims < DIM)[None, :]
    context = tl.load(contexts + first + number, mask=real, other=0).to(tl.int32)
    seen = context + tl.load(depths + first + number, mask=real, other=0).to(tl.int32)
    low = tl.where(window > 0, tl.maximum(seen - window, 0), 0)
    begin = tl.min(tl.where(real, low, 2**30), 0) // KEYS * KEYS
    end = tl.max(seen, 0)
    alike = end
    if DRAFTS:
        alike = tl.min(tl.where(real, context, 2**30), 0) // KEYS * KEYS
    head = kv_head * GROUP + lane
    at = (first + number).to(tl.int64) * query_stride + head * DIM
    q = tl.load(queries + at[:, None] + dims[None, :], mask=mask, other=0.0)
    row = (first + number).to(tl.int64) * (KV_HEADS * GROUP) + head
    for split in range(begin // SPLIT + tl.program_id(2), tl.cdiv(end, SPLIT), tl.num_programs(2)):
        start, stop = split * SPLIT, split * SPLIT + SPLIT
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, WIDTH], tl.float32)
        for tile_start in range(tl.maximum(start, begin), tl.minimum(stop, alike), KEYS):
            slots = tile_start + tl.arange(0, KEYS)
            inside = slots < end
            if PAGE % KEYS == 0:  # one page holds them all
                page = tl.load(table + tile_start // PAGE)
            else:
                page = tl.load(table + slots // PAGE, mask=inside, other=0)
            k = _load(keys, page, slots, inside, kv_head, KV_HEADS, DIM, WIDTH, PAGE)
            v = _load(values, page, slots, inside, kv_head, KV_HEADS, DIM, WIDTH, PAGE)
            visible = (slots[None, :] < seen[:, None]) & (slots[None, :] >= low[:, None])
            top, total, acc = _fold(q, k, v, visible, scale, top, total, acc, PRODUCT)
        if DRAFTS:
            top, total, acc = _fold_apart(
                q, keys, values, table, contexts, depths, picked, first, size, number,
                tl.maximum(start, alike), stop, window, kv_head, scale, top, total, acc,
                KV_HEADS, DIM, WIDTH, PAGE, KEYS, NODES, PRODUCT,
            )  # fmt: skip
        if SPLITS == 1:
            acc = acc / tl.where(real, total, 1.0)[:, None]
        part = row * SPLITS + split * (SPLITS > 1)
        to = out + (part * DIM)[:, None] + dims[None, :]
        tl.store(to, acc.to(out.dtype.element_ty), mask=mask)
        if SPLITS > 1:
            tl.store(stats + part * 2, top, mask=real)
            tl.store(stats + part * 2 + 1, total, mask=real)


@triton.jit
@no_type_check
def _join(parts, stats, contexts, depths, out, window, HEADS: tl.constexpr, DIM: tl.constexpr,
          WIDTH: tl.constexpr, SPLIT: tl.constexpr, SPLITS: tl.constexpr):  # fmt: skip
    """Join the splits of one token and head, first to last."""
    token = tl.program_id(0)
    row = token.to(tl.int64) * HEADS + tl.program_id(1)
    seen = (tl.load(contexts + token) + tl.load(depths + token)).to(tl.int32)
    low = tl.where(window > 0, tl.maximum(seen - window, 0), 0)
    dims = tl.arange(0, WIDTH)
    top = float("-inf")
    total = 0.0
    acc = tl.zeros([WIDTH], tl.float32)
    for split in range(low // SPLIT, tl.cdiv(seen, SPLIT)):
        part = row * SPLITS + split
        own = tl.load(stats + part * 2)
        higher = tl.maximum(top, own)
        shrink, share = tl.exp2(top - higher), tl.exp2(own - higher)
        total = total * shrink + tl.load(stats + part * 2 + 1) * share
        acc = acc * shrink + tl.load(parts + part * DIM + dims, mask=dims < DIM, other=0.0) * share
        top = higher
    result = (acc / total).to(out.dtype.element_ty)
    tl.store(out + row * DIM + dims, result, mask=dims < DIM)


@final
class TritonPageKernels(PageKernels):
    """Page kernels for float32, bfloat16 and float16; head_dim up to 256, best a power of two.

    Tensors are dense, but queries, keys and values may be slices of a wider projection.
    """

    def tile_size(self, group: int, *, long: bool) -> int:
        """Return the number of tokens whose heads fill a tile."""
        return max(1, (_LONG_ROWS if long else _ROWS) // triton.next_power_of_2(group))

    def store(self, keys: KVHeads, values: KVHeads, pages: Pages, addresses: Indices) -> None:
        """Store keys and values in one launch."""
        size = keys.shape[1] * keys.shape[2]
        for new, kept in zip((keys, values), pages, strict=True):
            assert new.stride()[1:] == (new.shape[2], 1), "heads of a token are contiguous"
            assert kept.is_contiguous(), "pages are contiguous"
        _store[len(keys),](
            keys, values, *pages, addresses, keys.stride(0), values.stride(0), size,
            triton.next_power_of_2(size),
        )  # fmt: skip

    def attend(
        self,
        queries: Heads,
        pages: Pages,
        tables: Int[Tensor, "rows row_pages"],
        places: Places,
        tiles: Tiles,
        window: int,
        *,
        long: bool,
    ) -> Heads:
        """Attend without waiting for the device."""
        tokens, heads, dim = queries.shape
        _, page, kv_heads, _ = pages.keys.shape
        assert queries.stride()[1:] == (dim, 1), "heads of a token are contiguous"
        lanes = triton.next_power_of_2(heads // kv_heads)
        split = _NO_SPLIT if long else _SPLIT
        splits = 1 if long else triton.cdiv(tables.shape[1] * page, split)
        num_tiles = len(tiles.firsts)
        programs = min(splits, triton.cdiv(_PROGRAMS, num_tiles * kv_heads))
        out = queries.new_empty(tokens, heads, dim)
        parts, stats = out, out
        if splits > 1:
            parts = queries.new_empty(tokens, heads, splits, dim, dtype=torch.float32)
            stats = queries.new_empty(tokens, heads, splits, 2, dtype=torch.float32)
        width = max(16, triton.next_power_of_2(dim))
        _attend[num_tiles, kv_heads, programs](
            queries, *pages, tables, places.rows, places.contexts, places.depths,
            _picked(places.visible), *tiles, parts, stats, queries.stride(0), tables.shape[1],
            dim**-0.5 * _LOG2_E, window, kv_heads, heads // kv_heads, dim, page,
            max(lanes, _LONG_ROWS if long else _ROWS), lanes, width, _KEYS, split, splits,
            MAX_NODES, not long, product_type(queries.dtype), num_warps=8 if long else 4,
            num_stages=2,
        )  # fmt: skip
        if splits > 1:
            _join[tokens, heads](
                parts, stats, places.contexts, places.depths, out, window, heads, dim, width,
                split, splits,
            )  # fmt: skip
        return out


def product_type(dtype: torch.dtype) -> tl.dtype:
    """Return the type of the factors. The interpreter has no bfloat16; float32 is as exact."""
    types = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
    if triton.knobs.runtime.interpret and dtype == torch.bfloat16:
        return tl.float32
    return types[dtype]


def _picked(visible: Indices) -> Int[Tensor, "tokens nodes"]:
    """Return the indices of set bits in rising order, then those of unset bits.

    Example: 0b1101 gives 0 2 3 1 4 5 ...
    """
    bits = visible[:, None] >> torch.arange(MAX_NODES, device=visible.device) & 1
    return bits.sort(dim=1, descending=True, stable=True).indices.to(torch.int32)
