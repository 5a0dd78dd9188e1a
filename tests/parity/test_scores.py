"""Fused log-probabilities and entropies are those of a softmax, and so are their gradients."""

import pytest
import torch

from longtail.model.kernels import native
from longtail.model.kernels.scores import Chunking, Head, NativeRows, TorchRows, token_scores

DTYPES = [torch.float64]
if native.functions(torch.float32) is not None:
    DTYPES += [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-5, torch.bfloat16: 0.04}
ROWS, HIDDEN, VOCAB = 300, 24, 1003


def tensors(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, weight and tokens; the numbers are the same in every dtype."""
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(ROWS, HIDDEN, generator=generator).to(torch.bfloat16)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator).to(torch.bfloat16)
    return hidden.to(dtype), weight.to(dtype), torch.randint(VOCAB, (ROWS,), generator=generator)


def plan(dtype: torch.dtype, chunk: int, held: int) -> Chunking:
    functions = native.functions(dtype) if dtype != torch.float64 else None
    passes = TorchRows() if functions is None else NativeRows(functions, dtype)
    return Chunking(passes=passes, chunk=chunk, held=held)


def coefficients() -> torch.Tensor:
    """Gradients of the logprobs: of both signs, some of them 0."""
    return torch.sin(torch.arange(ROWS, dtype=torch.float64)) * (torch.arange(ROWS) % 4 > 0)


def exact(temperature: float) -> tuple[torch.Tensor, ...]:
    hidden, weight, tokens = tensors(torch.float64)
    hidden.requires_grad_()
    weight.requires_grad_()
    logprobs = (hidden @ weight.t() / temperature).log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    own = logprobs.gather(-1, tokens[:, None])[:, 0]
    grads = torch.autograd.grad((own * coefficients()).sum(), (hidden, weight))
    return own.detach(), entropy.detach(), *grads


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("chunk", "held"), [(128, 256), (512, 512)])
def test_scores_and_gradients(dtype, temperature, chunk, held):
    hidden, computed, tokens = tensors(dtype)
    weight = computed.to(torch.float64 if dtype == torch.float64 else torch.float32)
    hidden.requires_grad_()
    weight.requires_grad_()
    head = Head(weight=weight, computed=computed)
    logprobs, entropy = token_scores(hidden, head, tokens, temperature, plan(dtype, chunk, held))
    assert not entropy.requires_grad
    (logprobs * coefficients()).sum().backward()
    expected = exact(temperature)
    limit = TOLERANCE[dtype]
    for found, right in zip(
        (logprobs.detach(), entropy, hidden.grad, weight.grad), expected, strict=True
    ):
        assert found is not None
        off = float((found.double() - right).abs().max())
        assert off <= limit * float(right.abs().max()), (off, float(right.abs().max()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_has_no_finite_logprob(dtype, broken):
    hidden, weight, tokens = tensors(dtype)
    hidden[7, 3] = broken
    head = Head(weight=weight, computed=weight)
    with torch.no_grad():
        logprobs, _ = token_scores(hidden, head, tokens, 1.0, plan(dtype, 128, 128))
    assert not logprobs[7].isfinite()
    assert logprobs[8].isfinite()


def test_a_certain_token_has_no_entropy_and_logprob_0():
    weight = torch.tensor([[200.0], [0.0], [-200.0]])
    head = Head(weight=weight, computed=weight)
    logprobs, entropy = token_scores(
        torch.ones(2, 1), head, torch.tensor([0, 1]), 1.0, plan(torch.float32, 128, 128)
    )
    assert logprobs.tolist() == pytest.approx([0.0, -200.0], abs=1e-5)
    assert entropy.tolist() == pytest.approx([0.0, 0.0], abs=1e-5)
