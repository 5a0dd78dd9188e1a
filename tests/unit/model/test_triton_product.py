"""The batch-invariant product of a GPU: against F.linear, and a row's bits against its batch."""

import pytest
import torch
import torch.nn.functional as F

from longtail.engine.engine import RolloutEngine
from longtail.engine.request import EngineLimits
from longtail.engine.speculation.speculator import Speculation
from longtail.model.kernels import linear
from longtail.model.kernels.linear import Linear
from longtail.model.kernels.triton_draws import TritonDraws
from longtail.model.kernels.triton_pages import TritonPageKernels
from longtail.model.kernels.triton_product import TritonProduct
from longtail.model.kernels.triton_small import TritonKernels
from longtail.speculation.strategy import Strategy
from longtail.types import Request, SamplingParams
from support.drafters import ScriptedDrafter, ragged
from support.fakes import unchecked_shapes
from support.interpreted import DEVICE, multiply_in_order
from support.paged import use_pages
from support.tiny_models import tiny_model

TOLERANCES = {torch.float32: 1e-7, torch.bfloat16: 2**-7}
"""Relative tolerance, beside 2e-5 for sums of 200 float32 products; the interpreter truncates
to bfloat16."""


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 200, 70), (65, 64, 33), (3, 7, 1)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_product_equals_f_linear(rows, inputs, outputs, has_bias, dtype):
    x, weight = normal(rows, inputs, dtype=dtype), normal(outputs, inputs, dtype=dtype)
    bias = normal(outputs, dtype=dtype) if has_bias else None
    found = TritonProduct(weight, bias)(x)
    assert found.dtype == dtype
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(found.double(), exact, rtol=TOLERANCES[dtype], atol=2e-5)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_a_row_has_the_same_bits_in_every_batch(dtype, monkeypatch):
    multiply_in_order(monkeypatch)
    product = TritonProduct(normal(40, 100, dtype=dtype), None)
    rows = normal(70, 100, dtype=dtype)
    together = product(rows)
    for start, end in ((0, 1), (5, 6), (63, 66), (69, 70), (10, 40)):
        assert product(rows[start:end].contiguous()).equal(together[start:end])


def test_batch_invariance_changes_nothing_on_a_cpu():
    """The mode is for GPUs; on a CPU rows are independent of their batch without it."""
    layer, x = Linear(32, 32), normal(5, 32).cpu()
    with torch.inference_mode():
        layer.weight.copy_(normal(32, 32).cpu())
        layer.pack()
        before = layer(x)
        layer.pack(batch_invariant=True)
        assert layer(x).equal(before)


@pytest.mark.slow
def test_speculation_changes_no_bit_with_gpu_kernels_and_they_change_no_token(monkeypatch):
    """Greedy, sampled and truncated requests, with right and wrong drafts; in float32."""
    samplings = ({}, {"temperature": 0.0}, {"temperature": 0.7, "top_k": 5})
    requests = [
        Request(
            request_id=str(i),
            prompt_tokens=(3, 1, 4),
            noise_key=i,
            sampling=SamplingParams(max_tokens=4, **each),
        )
        for i, each in enumerate(samplings)
    ]
    limits = EngineLimits(max_running=3, max_step_tokens=32, max_len=16)
    with unchecked_shapes():
        torch_only = RolloutEngine(tiny_model(), lambda _: "", limits).generate(requests)
        multiply_in_order(monkeypatch)
        monkeypatch.setattr(linear, "_native", lambda *_: None)
        monkeypatch.setattr(linear, "_blocked", TritonProduct)
        pages = TritonPageKernels()
        use_pages(monkeypatch, kernels=pages, draws=TritonDraws(), small=TritonKernels(pages))
        engine = RolloutEngine(tiny_model().to(DEVICE), lambda _: "", limits)
        plain = engine.generate(requests)
        texts = {done.request_id: (3, 1, 4, *done.tokens, 0) for done in plain}
        drafter = ScriptedDrafter(texts, ragged(3))
        engine.speculate(Speculation.fixed(drafter, Strategy(depth=3, width=2, size=5)))
        drafted = engine.generate(requests)
    assert 0 < drafter.num_accepted < drafter.num_nodes
    for one, other, exact in zip(plain, drafted, torch_only, strict=True):
        assert (one.tokens, one.logprobs) == (other.tokens, other.logprobs)
        assert one.tokens == exact.tokens
        assert one.logprobs == pytest.approx(exact.logprobs, abs=1e-4)
