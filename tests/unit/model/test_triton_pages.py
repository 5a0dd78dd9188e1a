"""The Triton attention over pages against the reference, and a row's bits against its batch.

Tolerances are absolute, for values of standard deviation 1: float32 a few hundred roundings of
6e-8; bfloat16 and float16 one rounding of the weights and one of the result, 2^-8 and 2^-11 each.
"""

import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from longtail.engine.batch import Segment
from longtail.engine.kv.cache import token_places
from longtail.engine.kv.paged_cache import cut_tiles
from longtail.model.kernels import triton_pages
from longtail.model.kernels.pages import Pages, Tiles, TorchPageKernels
from longtail.model.kernels.triton_pages import TritonPageKernels
from longtail.speculation.tree import EMPTY, DraftTree, depths, visible_nodes
from support.interpreted import DEVICE, multiply_in_order

TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 0.02, torch.float16: 0.003}
KERNELS = TritonPageKernels()


def tree(*parents: int) -> DraftTree:
    return DraftTree(tokens=(0,) * len(parents), parents=parents, margins=(0.0,) * len(parents))


def segment(context: int, count: int = 1, draft: DraftTree = EMPTY) -> Segment:
    return Segment(request_id="", num_context=context, num_tokens=count, draft=draft)


EXAMPLE = tree(0, 0, 1, 3)
MIXED = (segment(40), segment(0), segment(33, 1, EXAMPLE), segment(29, 3, tree(*range(6))))


class Case:
    """Random pages in random order, with NaN in slots without a token."""

    def __init__(
        self,
        segments: tuple[Segment, ...],
        *,
        heads: int = 4,
        kv_heads: int = 2,
        dim: int = 16,
        page: int = 16,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        ends = [each.num_context + each.num_tokens + each.draft.size for each in segments]
        row_pages = -(-max(ends) // page)
        order = torch.randperm(len(segments) * row_pages, generator=generator)
        self.segments, self.tables = segments, order.view(len(segments), row_pages).int()
        pages = torch.full((2, len(order), page, kv_heads, dim), torch.nan)
        for row, end in enumerate(ends):
            slots = torch.arange(end)
            at = self.tables[row, slots // page].long(), slots % page
            pages[:, *at] = torch.randn(2, end, kv_heads, dim, generator=generator)
        self.pages = pages
        self.counts = [each.num_tokens + each.draft.size for each in segments]
        self.queries = torch.randn(sum(self.counts), heads, dim, generator=generator)

    def attend(
        self,
        kernels: TritonPageKernels | TorchPageKernels = KERNELS,
        *,
        dtype: torch.dtype = torch.float32,
        window: int = 0,
        long: bool = False,
    ) -> Tensor:
        group = self.queries.shape[1] // self.pages.shape[3]
        tiles = cut_tiles(self.counts, kernels.tile_size(group, long=long))
        return kernels.attend(
            self.queries.to(DEVICE, dtype),
            Pages(*self.pages.to(DEVICE, dtype)),
            self.tables.to(DEVICE),
            token_places(self.segments, range(len(self.segments)), DEVICE),
            Tiles(*torch.tensor(tiles, device=DEVICE)),
            window,
            long=long,
        ).cpu()

    def check(
        self, dtype: torch.dtype = torch.float32, window: int = 0, *, long: bool = False
    ) -> None:
        found = self.attend(dtype=dtype, window=window, long=long)
        self.queries, self.pages = (x.to(dtype).double() for x in (self.queries, self.pages))
        expected = self.attend(TorchPageKernels(), dtype=torch.float64, window=window)
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), expected, rtol=0.0, atol=TOLERANCES[dtype])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dim", "dtype"),
    [
        *((dim, torch.float32) for dim in (64, 80, 128)),
        (64, torch.bfloat16),
        (80, torch.bfloat16),
        (128, torch.float16),
    ],
    ids=str,
)
def test_attention_equals_the_reference_for_every_head_size_and_dtype(dim, dtype):
    Case(MIXED, dim=dim).check(dtype)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("kv_heads", "dim"), [(1, 16), (4, 80)])
def test_keys_and_values_are_stored_at_their_addresses_only(kv_heads, dim, dtype):
    """Keys and values are slices of a projection, as in the decoder."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(5, 3 + kv_heads, dim, generator=generator).to(DEVICE, dtype)[:, 3:]
    values = torch.randn(5, 6 + kv_heads, dim, generator=generator).to(DEVICE, dtype)[:, 6:]
    addresses = torch.tensor([7, 31, 0, 16, 8], device=DEVICE)
    mine, expected = (
        Pages(*torch.zeros(2, 4, 8, kv_heads, dim, device=DEVICE, dtype=dtype)) for _ in range(2)
    )
    KERNELS.store(keys, values, mine, addresses)
    TorchPageKernels().store(keys, values, expected, addresses)
    assert mine.keys.equal(expected.keys)
    assert mine.values.equal(expected.values)


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (7, 1)])
def test_any_number_of_query_heads_shares_a_key_head(heads, kv_heads):
    Case(MIXED, heads=heads, kv_heads=kv_heads).check()


@pytest.mark.slow
@pytest.mark.parametrize("window", [1, 4, 33, 1000])
def test_a_window_counts_back_through_draft_and_text(window):
    no_deeper = MIXED if window > 6 else (segment(40), segment(29, 3, tree(*[0] * 4)))
    segments = no_deeper if window > 1 else (segment(40), segment(2, 5))
    Case(segments).check(window=window)


@pytest.mark.slow
@pytest.mark.parametrize(("window", "programs"), [(0, 1), (0, 512), (50, 512), (70, 1)])
def test_long_texts_are_cut_into_splits_and_joined(monkeypatch, window, programs):
    """Splits have 64 keys; texts end before, at and after the end of a split, or far after."""
    monkeypatch.setattr(triton_pages, "_SPLIT", 64)
    monkeypatch.setattr(triton_pages, "_PROGRAMS", programs)
    segments = (segment(62, 2), segment(64), segment(200, 1, EXAMPLE), segment(0))
    Case(segments).check(window=window)


@pytest.mark.slow
@pytest.mark.parametrize(("window", "heads"), [(0, 2), (7, 14)])
def test_prefill_tokens_see_the_text_up_to_themselves(window, heads):
    Case((segment(20, 37), segment(0, 9), segment(3, 40)), heads=heads).check(
        window=window, long=True
    )


@pytest.mark.slow
def test_padding_tiles_are_not_computed():
    """A captured step has padding: tiles of size 0 and tokens outside all tiles."""
    case = Case(MIXED)
    expected = case.attend()
    case.counts += [0, 0]
    padded = torch.cat((case.queries, torch.full((5, 4, 16), torch.nan)))
    tiles = cut_tiles(case.counts, KERNELS.tile_size(2, long=False))
    places = token_places(MIXED, range(len(MIXED)), DEVICE)
    out = KERNELS.attend(
        padded.to(DEVICE),
        Pages(*case.pages.to(DEVICE)),
        case.tables.to(DEVICE),
        type(places)(*(torch.cat((each, each.new_zeros(5))) for each in places)),
        Tiles(*(torch.tensor([*each, 0, 0], device=DEVICE) for each in tiles)),
        0,
        long=False,
    )
    assert out[: len(expected)].cpu().equal(expected)


def random_tree(rng: random.Random, size: int) -> DraftTree:
    return tree(*(rng.randint(0, i) for i in range(size)))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_drafted_token_has_the_bits_of_plain_decoding(monkeypatch, dtype):
    """Compare every node of a tree with the same keys as a text, attended alone."""
    multiply_in_order(monkeypatch)
    monkeypatch.setattr(triton_pages, "_SPLIT", 64)
    rng, context = random.Random(0), 63
    draft = random_tree(rng, 7)
    case = Case((segment(rng.randint(0, 90)), segment(context, 2, draft), segment(5, 1, EXAMPLE)))
    together = case.attend(dtype=dtype)
    row = case.pages[:, case.tables[1].long()].flatten(1, 2)
    for node in range(draft.size):
        mask = visible_nodes(draft.parents)[node]
        seen = [*range(context + 2), *(context + 2 + i for i in range(7) if mask >> i & 1)]
        alone = Case((segment(len(seen) - 1),), page=32, seed=100)
        slots = torch.arange(len(seen))
        alone.pages[:, alone.tables[0, slots // 32].long(), slots % 32] = row[:, seen]
        alone.queries = case.queries[1 + 2 + node :][:1]
        assert len(seen) == context + 2 + depths(draft.parents)[node]
        assert alone.attend(dtype=dtype)[0].equal(together[1 + 2 + node]), f"node {node + 1}"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_prompt_in_pieces_has_the_bits_of_a_whole_one(monkeypatch, dtype):
    """With the small tiles, which a batch-invariant cache uses for prompts, too."""
    multiply_in_order(monkeypatch)
    monkeypatch.setattr(triton_pages, "_SPLIT", 64)
    case = Case((segment(57, 20),))
    queries, whole = case.queries, case.attend(dtype=dtype)
    for cut in (9,):
        pieces = []
        for start, end in ((0, cut), (cut, 20)):
            case.segments = (segment(57 + start, end - start),)
            case.counts, case.queries = [end - start], queries[start:end]
            pieces.append(case.attend(dtype=dtype))
        assert torch.cat(pieces).equal(whole), f"cut at {cut}"


COMPILE = """
import sys, triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from longtail.model.kernels import triton_pages

# the draws and the small ones beside it, since starting a process is what takes time
from longtail.model.kernels import triton_draws, triton_small

def build(kernel, types, constants):
    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    source = ASTSource(kernel, signature, {(names.index(n),): v for n, v in constants.items()})
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_stages": 2})
    assert "mma" in built.asm["ptx"] or kernel is not triton_pages._attend

wide = dict.fromkeys(("rows", "contexts", "depths", "firsts", "sizes"), "*i64")
plain = dict(query_stride="i32", row_pages="i32", scale="fp32", window="i32")
data = dict.fromkeys(("queries", "keys", "values"), "*bf16")
sizes = dict(KV_HEADS=4, GROUP=7, DIM=128, PAGE=64, LANES=8, WIDTH=128, KEYS=32, NODES=62)
few, long = (32, 512, 8, True, "*fp32"), (64, 2**30, 1, False, "*bf16")
for rows, split, splits, drafts, out in (few, long):
    types = {**wide, **plain, **data, "tables": "*i32", "picked": "*i32", "out": out, "stats": out}
    build(triton_pages._attend, types, {**sizes, "ROWS": rows, "SPLIT": split, "SPLITS": splits,
          "DRAFTS": drafts, "PRODUCT": tl.bfloat16})
build(triton_pages._join, {**wide, "parts": "*fp32", "stats": "*fp32", "out": "*bf16",
      "window": "i32"}, dict(HEADS=28, DIM=128, WIDTH=128, SPLIT=512, SPLITS=8))

floats = ("temperatures", "tops", "sums", "log_sums", "scores", "logprobs", "out")
types = {**dict.fromkeys(floats, "*fp32"), **dict.fromkeys(("lows", "highs", "tokens"), "*i32"),
         "logits": "*bf16", "stride": "i32"}
sizes = dict(CHUNKS=19, VOCAB=152064, CHUNK=8192, BLOCK=1024)
for kernel in (triton_draws._normalise, triton_draws._best):
    build(kernel, types, sizes)
build(triton_draws._noise, types, dict(VOCAB=152064, BLOCK=1024))

halves = ("stream", "delta", "weight", "total", "normed", "qkv", "q_weight", "k_weight", "cos",
          "sin", "gate_up", "out", "keys", "values", "key_pages", "value_pages")
types = {**dict.fromkeys(halves, "*bf16"), "addresses": "*i64", "eps": "fp32",
         "key_stride": "i32", "value_stride": "i32"}
build(triton_pages._store, types, dict(SIZE=512, BLOCK=512))
build(triton_small._swiglu, types, dict(INNER=18944, BLOCK=1024))
for yes in (True, False):
    build(triton_small._add_norm, types, dict(HIDDEN=3584, BLOCK=4096, ADD=yes))
    build(triton_small._rotate, types, dict(QUERIES=28, ROTATED=32, ALL=36, HALF=64, HEADS=8,
          WIDTH=64, NORM=yes))
"""


@pytest.mark.slow
def test_the_kernels_compile_for_hopper_without_a_gpu(tmp_path: Path):
    """The compiler needs no GPU, so its errors are found here."""
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        env={"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": ":".join(sys.path), "HOME": "/tmp"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
