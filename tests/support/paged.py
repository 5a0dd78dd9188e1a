"""The engine as it is on a GPU, on a CPU: with PyTorch's kernels, or with interpreted ones."""

import pytest

from longtail.engine import engine
from longtail.engine.kv.cache import KVCache
from longtail.engine.kv.paged_cache import PagedKVCache
from longtail.engine.request import EngineLimits
from longtail.engine.step import runner
from longtail.engine.step.sampler import KeyedSampler, Sampler
from longtail.model import transformer
from longtail.model.kernels.draws import Draws, TorchDraws
from longtail.model.kernels.ops import Kernels
from longtail.model.kernels.pages import PageKernels, TorchPageKernels
from longtail.model.transformer import Transformer
from longtail.speculation.tree import MAX_NODES


def use_pages(
    monkeypatch: pytest.MonkeyPatch,
    *,
    block_size: int = 8,
    kernels: PageKernels | None = None,
    draws: Draws | None = None,
    small: Kernels | None = None,
) -> None:
    """Give engines that are made from now on pages, and noise that is not written down.

    With `model.graphs = GraphPool(FakeGraphs())` their short steps are captured, too.
    """

    def make_paged(model: Transformer, limits: EngineLimits) -> KVCache:
        longest = -(-limits.max_len // block_size) * block_size
        total = limits.kv_tokens or longest * limits.max_running
        return PagedKVCache(
            model.config,
            num_tokens=-(-total // block_size) * block_size,
            max_rows=limits.max_running,
            max_len=limits.max_len + MAX_NODES,
            dtype=model.dtype,
            device=model.device,
            kernels=kernels or TorchPageKernels(),
            block_size=block_size,
        )

    def make_keyed(model: Transformer) -> Sampler:
        return KeyedSampler(draws or TorchDraws(), model.config.vocab_size, model.device)

    if small is not None:
        monkeypatch.setattr(transformer, "select_kernels", lambda *_: small)
    monkeypatch.setattr(engine, "make_kv", make_paged)
    monkeypatch.setattr(runner, "make_sampler", make_keyed)
