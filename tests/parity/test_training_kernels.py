"""Fused training kernels are the PyTorch definition, values and gradients."""

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from longtail.model.attention import PackedAttention
from longtail.model.kernels import native, training_products
from longtail.model.kernels.ops import HeadNorms, Kernels
from longtail.model.kernels.training_ops import NativeTrainingKernels, select_training_kernels
from longtail.model.kernels.training_products import training_product
from longtail.model.rope import Rope, RopeConfig
from longtail.model.transformer import Transformer
from support.tiny_models import tiny_model

pytestmark = pytest.mark.skipif(
    native.functions(torch.float32) is None, reason="needs a C compiler"
)

TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}
"""float32 sums of at most some hundred terms of size 1, in another order: 100 eps is 1e-5."""

SIZES = st.integers(min_value=1, max_value=70)


def fused() -> Kernels:
    kernels = select_training_kernels(torch.float32, torch.device("cpu"))
    assert isinstance(kernels, NativeTrainingKernels)
    return kernels


def gradients(output: torch.Tensor, inputs: list[torch.Tensor], seed: int) -> list[torch.Tensor]:
    """Gradients of a random weighting of the output, so that no entry can hide."""
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(seed))
    return list(torch.autograd.grad((output * weights).sum(), inputs, retain_graph=True))


def tensors(seed: int, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


@pytest.fixture(params=[False, True], ids=["mkl", "onednn"], scope="module")
def maker(request: pytest.FixtureRequest) -> Iterator[None]:
    """Products as on a processor that is Intel's, and as on any other."""
    if request.param and not torch._C._has_mkldnn:
        pytest.skip("this PyTorch has no oneDNN")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_products, "_prefers_onednn", lambda: request.param)
        yield


def both(
    compute: Callable[[Kernels], torch.Tensor], inputs: Sequence[torch.Tensor], seed: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Our value and gradients, each with that of the definition."""
    ours, definition = (
        [out := compute(kernels), *gradients(out, list(inputs), seed)]
        for kernels in (fused(), Kernels())
    )
    return list(zip(ours, definition, strict=True))


@given(tokens=SIZES, hidden=SIZES, has_delta=st.booleans(), seed=st.integers(0, 2**31))
@settings(max_examples=30, deadline=None)
def test_add_norm_and_its_gradients(tokens, hidden, has_delta, seed):
    stream, delta, weight = tensors(seed, (tokens, hidden), (tokens, hidden), (hidden,))
    given_delta, summed = (delta, [stream, delta]) if has_delta else (None, [stream])
    for part, inputs in (("normed", [*summed, weight]), ("stream", summed)):
        if part == "stream" and not has_delta:
            continue  # nothing is added: the stream is its input
        for ours, definition in both(
            lambda kernels, part=part: getattr(
                kernels.add_norm(stream, given_delta, weight, 1e-5), part
            ),
            inputs,
            seed,
        ):
            torch.testing.assert_close(ours, definition, **TOLERANCE)


@given(
    tokens=SIZES,
    heads=st.integers(1, 4),
    group=st.integers(1, 3),
    half=st.integers(1, 40),
    normed=st.booleans(),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=30, deadline=None)
def test_rotate_and_its_gradients(tokens, heads, group, half, normed, seed):
    dim, num_heads = 2 * half, heads * group
    qkv, *weights = tensors(seed, (tokens, num_heads + 2 * heads, dim), (dim,), (dim,))
    rotation = Rope(dim, RopeConfig()).rotation(torch.arange(tokens), torch.float32)
    norms = HeadNorms(num_heads, 1e-5, *(weights if normed else ()))
    found = both(
        lambda kernels: torch.cat(tuple(kernels.rotate(qkv, norms, rotation)), 1),
        [qkv, *(weights if normed else ())],
        seed,
    )
    of_weights = TOLERANCE["atol"] * (tokens * num_heads) ** 0.5  # they sum over these
    limits = (TOLERANCE["atol"], TOLERANCE["atol"], of_weights, of_weights)
    for (ours, definition), limit in zip(found, limits, strict=False):
        torch.testing.assert_close(ours, definition, rtol=TOLERANCE["rtol"], atol=limit)


@given(tokens=SIZES, size=SIZES, scale=st.sampled_from([1.0, 30.0]), seed=st.integers(0, 2**31))
@settings(max_examples=30, deadline=None)
def test_swiglu_and_its_gradient(tokens, size, scale, seed):
    (gate_up,) = tensors(seed, (tokens, 2 * size))
    for ours, definition in both(lambda kernels: kernels.swiglu(gate_up * scale), [gate_up], seed):
        # relative to the largest entry: products of numbers up to 100
        limit = float(definition.detach().abs().max()) * 1e-5 + 1e-6
        torch.testing.assert_close(ours, definition, rtol=1e-4, atol=limit)


@pytest.mark.usefixtures("maker")
@pytest.mark.parametrize(
    ("family", "recompute"),
    [("llama", True), ("qwen2", False), ("qwen3", True), ("mistral", False)],
)
def test_a_fused_model_has_the_gradients_of_the_plain_one(family, recompute):
    model = tiny_model(family, seed=3)
    plain = gradients_of_a_text(model, recompute=recompute)
    model.fuse()
    for name, ours in gradients_of_a_text(model, recompute=recompute).items():
        limit = float(plain[name].abs().max()) * 1e-4 + 1e-6
        torch.testing.assert_close(ours, plain[name], rtol=1e-4, atol=limit, msg=name)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_a_fused_model_under_autocast_is_as_close_to_the_exact_gradients(family, monkeypatch):
    exact = gradients_of_a_text(tiny_model(family, seed=3).double())
    model = tiny_model(family, seed=3)
    with torch.autocast("cpu", torch.bfloat16):
        plain = gradients_of_a_text(model)
        model.fuse()
        for name in ("rotate", "swiglu"):  # no other implementation is left
            monkeypatch.delattr(Kernels, name)
        ours = gradients_of_a_text(model)
    off = [
        sum(float((found[name] - exact[name]).square().sum()) for name in exact) ** 0.5
        for found in (plain, ours)
    ]
    assert 0 < off[1] < 1.1 * off[0]


def gradients_of_a_text(model: Transformer, *, recompute: bool = False) -> dict[str, torch.Tensor]:
    """Gradients of the log-probability of two random texts."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, model.config.vocab_size, (30,), generator=generator)
    positions = torch.cat((torch.arange(18), torch.arange(12)))
    model.zero_grad()
    hidden = model(tokens, positions, PackedAttention((0, 18, 30)), recompute=recompute)
    logprobs = model.logits(hidden).log_softmax(-1)
    logprobs[torch.arange(29), tokens[1:]].sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.slow
@pytest.mark.usefixtures("maker")
@settings(deadline=None)
@given(rows=SIZES, inputs=SIZES, outputs=SIZES, biased=st.booleans(), seed=st.integers(0, 99))
def test_a_trained_product_and_its_gradients_are_those_of_linear(
    rows, inputs, outputs, biased, seed
):
    own = tensors(seed, (rows, inputs), (outputs, inputs), *([(outputs,)] if biased else []))
    bias = own[2] if biased else None
    fast = training_product(own[0], own[1], bias)
    plain = F.linear(own[0], own[1], bias)
    torch.testing.assert_close(fast, plain, **TOLERANCE)
    for found, expected in zip(
        gradients(fast, own, seed), gradients(plain, own, seed), strict=True
    ):
        torch.testing.assert_close(found, expected, **TOLERANCE)


def test_kernels_are_compiled_for_few_numbers_of_rows(monkeypatch):
    """A learner meets another number of tokens in every micro-batch; what is compiled is kept."""
    shapes: list[torch.Size] = []
    made = training_products._onednn
    monkeypatch.setattr(training_products, "_prefers_onednn", lambda: True)
    monkeypatch.setattr(
        training_products, "_onednn", lambda x, *others: shapes.append(x.shape) or made(x, *others)
    )
    for rows in (1, 2, 77, 128, 129, 255, 256):
        x, weight = tensors(0, (rows, 8), (5, 8))
        training_product(x, weight, None).sum().backward()
    assert len(shapes) == 7 * 3, "forward, for x, for the weight"
    assert len(set(shapes)) == 4 * 3, "of 1, 2, 128 and 256 rows"
