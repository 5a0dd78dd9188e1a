"""Kernels of `longtail bench gpu`: against their definitions, and against the device.

Errors are absolute, for values of standard deviation 1. Seconds are medians of repeated runs, each
waited for.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor

from longtail.engine.batch import Segment
from longtail.engine.kv.cache import token_places
from longtail.engine.kv.paged_cache import cut_tiles
from longtail.model.kernels.draws import Draws, TorchDraws
from longtail.model.kernels.ops import Kernels, TorchKernels
from longtail.model.kernels.pages import PageKernels, Pages, Tiles, TorchPageKernels
from longtail.sampling import gumbel_noise
from longtail.speculation.tree import EMPTY, DraftTree

_TREE = DraftTree(tokens=(0,) * 6, parents=(0, 0, 1, 3, 2, 5), margins=(0.0,) * 6)
_TOLERANCES = {torch.float32: 5e-6, torch.bfloat16: 0.02}


@final
class DeviceClock:
    """A clock for work on one device."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device, self._repeats = device, repeats

    def seconds(self, run: Callable[[], object], *, inner: int = 1) -> float:
        """Return the median seconds of a run, warmed up; `inner` runs are waited for together."""
        for _ in range(2):
            run()
        seconds = []
        for _ in range(self._repeats):
            self._wait()
            started = time.perf_counter()
            for _ in range(inner):
                run()
            self._wait()
            seconds.append((time.perf_counter() - started) / inner)
        return statistics.median(seconds)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Shape of attention heads.

    Example: Heads(queries=28, keys=4, dim=128)
    """

    queries: int
    keys: int
    dim: int


class Here(NamedTuple):
    """Kernels of this device."""

    pages: PageKernels
    draws: Draws
    small: Kernels


def kernels_here() -> Here:
    """Return Triton's kernels, interpreted on a CPU; without Triton, the definitions."""
    if find_spec("triton") is None:
        return Here(TorchPageKernels(), TorchDraws(), TorchKernels())
    from longtail.model.kernels.triton_draws import TritonDraws
    from longtail.model.kernels.triton_pages import TritonPageKernels
    from longtail.model.kernels.triton_small import TritonKernels

    pages = TritonPageKernels()
    return Here(pages, TritonDraws(), TritonKernels(pages))


class Case:
    """Random pages and queries of the given segments."""

    def __init__(
        self, segments: Sequence[Segment], heads: Heads, dtype: torch.dtype, device: torch.device
    ) -> None:
        generator = torch.Generator(device).manual_seed(0)
        page = 64
        ends = [each.num_context + each.num_tokens + each.draft.size for each in segments]
        row_pages = -(-max(ends) // page)
        order = torch.randperm(len(segments) * row_pages, generator=generator, device=device)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device).to(dtype)

        self.pages = Pages(*normal(2, len(order), page, heads.keys, heads.dim))
        self.tables = order.view(len(segments), row_pages).to(torch.int32)
        self.counts = [each.num_tokens + each.draft.size for each in segments]
        self.queries = normal(sum(self.counts), heads.queries, heads.dim)
        self.places = token_places(segments, range(len(segments)), device)
        self.group = heads.queries // heads.keys

    def tiles(self, kernels: PageKernels, counts: Sequence[int]) -> Tiles:
        """Cut `counts` tokens of each request into tiles."""
        cut = cut_tiles(counts, kernels.tile_size(self.group, long=False))
        return Tiles(*torch.tensor(cut, device=self.queries.device))

    def attend(self, kernels: PageKernels, tiles: Tiles) -> Tensor:
        """Attend with bits that do not depend on the batch."""
        return kernels.attend(
            self.queries, self.pages, self.tables, self.places, tiles, 0, long=False
        )


def _segment(context: int, count: int = 1, draft: DraftTree = EMPTY) -> Segment:
    return Segment(request_id="", num_context=context, num_tokens=count, draft=draft)


@torch.inference_mode()
def checks(heads: Heads, vocab_size: int, device: torch.device, *, long: int) -> dict[str, Any]:
    """Compare the kernels with their definitions; contexts of up to `long` tokens."""
    pages, draws, _ = kernels_here()
    segments = (_segment(0), _segment(37, 1, _TREE), _segment(long, 1, _TREE), _segment(long - 9))
    found: dict[str, Any] = {}
    for dtype, tolerance in _TOLERANCES.items():
        case = Case(segments, heads, dtype, device)
        out = case.attend(pages, case.tiles(pages, case.counts))
        case.queries, case.pages = case.queries.double(), Pages(*(p.double() for p in case.pages))
        exact = case.attend(TorchPageKernels(), case.tiles(pages, case.counts))
        error = float((out.double() - exact).abs().max())
        name = str(dtype).removeprefix("torch.")
        found[f"attention_error_{name}"] = error
        found[f"attention_ok_{name}"] = error <= tolerance
    case = Case(segments, heads, torch.bfloat16, device)
    together = case.attend(pages, case.tiles(pages, case.counts))
    alone = case.attend(pages, case.tiles(pages, [1] * sum(case.counts)))
    found["bits_do_not_depend_on_the_batch"] = bool(together.equal(alone))
    keys = torch.arange(8, device=device) * 77
    noise = draws.noise(keys, keys, vocab_size).cpu()
    error = float((noise - gumbel_noise(keys.cpu(), keys.cpu(), vocab_size)).abs().max())
    found["noise_error"], found["noise_ok"] = error, error <= 1e-5
    logits = 3 * torch.randn(8, vocab_size, device=device)
    warm = torch.tensor([1.0, 0.6] * 4, device=device)
    drawn = draws.draw(logits, keys, keys, warm)
    expected = TorchDraws().draw(logits.cpu(), keys.cpu(), keys.cpu(), warm.cpu())
    found["draws_that_differ"] = int((drawn.tokens.cpu() != expected.tokens).sum())
    found["ok"] = all(value for name, value in found.items() if "_ok" in name) and (
        found["bits_do_not_depend_on_the_batch"] and not found["draws_that_differ"]
    )
    return found


@torch.inference_mode()
def copy_bandwidth(clock: DeviceClock, num_bytes: int) -> float:
    """Return the bytes per second of a copy within the device, read and written."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=clock.device)
    target = torch.empty_like(source)
    return 2 * num_bytes / clock.seconds(lambda: target.copy_(source), inner=3)


@torch.inference_mode()
def attention(
    heads: Heads, clock: DeviceClock, bandwidth: float, *, batch: int, context: int
) -> dict[str, Any]:
    """Time one decode step of attention: the kernel, PyTorch on contiguous keys, and the bound."""
    pages = kernels_here().pages
    dtype, device = torch.bfloat16, clock.device
    case = Case([_segment(context - 1)] * batch, heads, dtype, device)
    tiles = case.tiles(pages, case.counts)
    shape = (batch, heads.keys, context, heads.dim)
    keys, values = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    query = case.queries[:, :, None]
    kernel_s = clock.seconds(lambda: case.attend(pages, tiles), inner=5)
    sdpa_s = clock.seconds(
        lambda: F.scaled_dot_product_attention(query, keys, values, enable_gqa=True), inner=5
    )
    bound_s = 2 * keys.numel() * dtype.itemsize / bandwidth
    return {
        "batch": batch,
        "context": context,
        "kernel_us": kernel_s * 1e6,
        "sdpa_us": sdpa_s * 1e6,
        "flex_us": _flex_us(clock, query, keys, values) if device.type == "cuda" else None,
        "bound_us": bound_s * 1e6,
        "kernel_over_bound": kernel_s / bound_s,
    }


def _flex_us(clock: DeviceClock, query: Tensor, keys: Tensor, values: Tensor) -> float | None:
    """Return the microseconds of compiled FlexAttention; None where it refuses the shapes."""
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    try:
        return clock.seconds(lambda: compiled(query, keys, values, enable_gqa=True), inner=5) * 1e6
    except (RuntimeError, ValueError, AssertionError):
        return None


@torch.inference_mode()
def sampling(vocab_size: int, rows: int, clock: DeviceClock, bandwidth: float) -> dict[str, Any]:
    """Time draws for many rows: with noise hashed in the kernel, and with noise in memory."""
    draws = kernels_here().draws
    device = clock.device
    logits = torch.randn(rows, vocab_size, device=device).to(torch.bfloat16)
    keys, warm = torch.arange(rows, device=device), torch.ones(rows, device=device)
    fused_s = clock.seconds(lambda: draws.draw(logits, keys, keys, warm))
    plain_s = clock.seconds(lambda: TorchDraws().draw(logits, keys, keys, warm))
    bound_s = logits.numel() * logits.element_size() / bandwidth
    return {
        "rows": rows,
        "vocab_size": vocab_size,
        "fused_us": fused_s * 1e6,
        "in_memory_us": plain_s * 1e6,
        "bound_us": bound_s * 1e6,
    }
