"""The small operations in Triton against the reference, and a row's bits against its batch.

Both round in the same places, so results are equal up to float32's last places. Where these change
a rounding, or the interpreter truncates to bfloat16, they differ by a unit in the last place of the
dtype for each of the three roundings on the longest path.
"""

import pytest
import torch
from torch import Tensor

from longtail.model import transformer
from longtail.model.attention import PackedAttention
from longtail.model.kernels import triton_small
from longtail.model.kernels.ops import TorchKernels
from longtail.model.kernels.triton_pages import TritonPageKernels
from longtail.model.kernels.triton_small import TritonKernels
from longtail.model.rope import Rope, RopeConfig
from longtail.model.transformer import Family, Transformer
from longtail.speculation.drafter import Taps
from support.fakes import unchecked_shapes
from support.interpreted import DEVICE
from support.tiny_models import tiny_model

ROUNDINGS = {torch.float32: 2**-20, torch.bfloat16: 3 * 2**-7, torch.float16: 3 * 2**-10}
"""Tolerance relative to the result, and to the largest of the added terms."""
KERNELS, TORCH = TritonKernels(TritonPageKernels()), TorchKernels()
dtypes = pytest.mark.parametrize("dtype", ROUNDINGS, ids=str)


def normal(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (scale * torch.randn(shape, generator=generator)).to(DEVICE, dtype)


def assert_same(mine: Tensor, expected: Tensor, terms: Tensor | float = 0.0) -> None:
    assert (mine.dtype, mine.shape) == (expected.dtype, expected.shape)
    allowed = ROUNDINGS[mine.dtype] * (expected.double().abs() + terms)
    assert bool(((mine.double() - expected.double()).abs() <= allowed).all())


@dtypes
@pytest.mark.parametrize("hidden", [1, 33, 3584])
@pytest.mark.parametrize("scale", [1e-4, 30.0])
def test_add_norm_equals_the_reference(hidden, scale, dtype):
    stream, delta = normal(2, 3, hidden, dtype=dtype, scale=scale)
    weight, inputs = normal(hidden, dtype=dtype), stream.clone()
    found = KERNELS.add_norm(stream, delta, weight, 1e-6)
    expected = TORCH.add_norm(stream, delta, weight, 1e-6)
    assert_same(found.stream, expected.stream)
    # of the sum as it was rounded there
    assert_same(found.normed, TORCH.add_norm(found.stream, None, weight, 1e-6).normed)
    assert stream.equal(inputs), "a captured pass runs twice on its inputs"

    alone = KERNELS.add_norm(stream, None, weight, 1e-6)
    assert alone.stream is stream
    assert_same(alone.normed, TORCH.add_norm(stream, None, weight, 1e-6).normed)


@pytest.mark.slow
@dtypes
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(3, 3, 16), (7, 1, 80), (28, 4, 128)])
@pytest.mark.parametrize("has_norm", [False, True], ids=["plain", "norm"])
def test_rotate_equals_the_reference(heads, kv_heads, dim, has_norm, dtype):
    qkv = normal(3, heads + 2 * kv_heads, dim, dtype=dtype, scale=3.0)
    weights = 1 + 0.3 * normal(2, dim, dtype=dtype)
    q_weight, k_weight = weights if has_norm else (None, None)
    positions = torch.tensor([0, 5, 31_000], device=DEVICE)
    scaled = RopeConfig(scaling="yarn", factor=4.0, original_max_positions=64)
    rotation = Rope(dim, scaled).rotation(positions, KERNELS.rotation_dtype(dtype))
    found = KERNELS.rotate(qkv, heads, q_weight, k_weight, 1e-6, rotation)
    expected = TORCH.rotate(qkv, heads, q_weight, k_weight, 1e-6, rotation)
    for mine, other in zip(found, expected, strict=True):
        assert_same(mine, other, terms=other.double().abs().amax(-1, keepdim=True))
    assert found.values.data_ptr() == qkv[:, heads + kv_heads :].data_ptr(), "not copied"


@dtypes
@pytest.mark.parametrize("inner", [1, 97, 2100])
@pytest.mark.parametrize("scale", [1e-3, 10.0])
def test_swiglu_equals_the_reference(inner, scale, dtype):
    gate_up = normal(2, 2 * inner, dtype=dtype, scale=scale)
    assert_same(KERNELS.swiglu(gate_up), TORCH.swiglu(gate_up))


def test_the_kernels_round_where_the_reference_rounds():
    """In float16, which is rounded here as on a GPU, hardly a bit differs from the learner's.

    Without the intermediate roundings, a tenth of the rotated or gated values would differ.
    """
    stream, delta = normal(2, 5, 400, dtype=torch.float16)
    qkv, weights = normal(5, 9, 64, dtype=torch.float16), normal(2, 64, dtype=torch.float16)
    rotation = Rope(64, RopeConfig()).rotation(torch.arange(5, device=DEVICE), torch.float16)

    def compute(kernels: TorchKernels) -> list[Tensor]:
        residual = kernels.add_norm(stream, delta, stream[0], 1e-6)
        plain = kernels.rotate(qkv, 7, None, None, 1e-6, rotation)
        normed = kernels.rotate(qkv, 7, *weights, 1e-6, rotation)
        return [*residual, *plain, *normed, kernels.swiglu(stream)]

    for mine, other in zip(compute(KERNELS), compute(TORCH), strict=True):
        assert float((mine != other).float().mean()) < 0.02


@dtypes
def test_nan_and_infinity_are_passed_on(dtype):
    """The engine detects NaN weights by their logits, so kernels must pass NaN on."""
    stream = normal(2, 40, dtype=dtype)
    stream[0, 7] = torch.nan
    normed = KERNELS.add_norm(stream, None, torch.ones_like(stream[0]), 1e-6).normed
    assert normed.isnan().all(1).tolist() == [True, False]
    assert normed[1].isfinite().all()
    gate_up = normal(1, 10, dtype=dtype)
    gate_up[0, 1] = gate_up[0, 8] = torch.nan
    assert KERNELS.swiglu(gate_up).isnan().tolist() == [[False, True, False, True, False]]


@pytest.mark.slow
@dtypes
def test_a_row_has_the_same_bits_in_every_batch(dtype, monkeypatch):
    """Several programs compute a token, as in a large model."""
    monkeypatch.setattr(triton_small, "_PAIRS", 64)
    monkeypatch.setattr(triton_small, "_BLOCK", 32)
    tokens, hidden, dim = 9, 100, 32
    stream, delta = normal(2, tokens, hidden, dtype=dtype)
    qkv, weight = normal(tokens, 12, dim, dtype=dtype), normal(hidden, dtype=dtype)
    rope, positions = Rope(dim, RopeConfig()), 31 * torch.arange(tokens, device=DEVICE)

    def compute(part: slice) -> list[Tensor]:
        rotation = rope.rotation(positions[part], dtype)
        norms = weight[:dim], weight[-dim:].clone()
        residual = KERNELS.add_norm(stream[part].clone(), delta[part].clone(), weight, 1e-6)
        rotated = KERNELS.rotate(qkv[part].clone(), 8, *norms, 1e-6, rotation)
        return [*residual, *rotated, KERNELS.swiglu(stream[part].clone())]

    together = compute(slice(None))
    for part in (slice(0, 1), slice(4, 5), slice(8, 9), slice(2, 7)):
        for alone, all_of_it in zip(compute(part), together, strict=True):
            assert alone.equal(all_of_it[part])


def run(model: Transformer, kernels: TorchKernels, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    monkeypatch.setattr(transformer, "select_kernels", lambda *_: kernels)
    model.pack()
    tokens = torch.arange(11, device=DEVICE) * 7 % 128
    positions = torch.tensor([*range(6), *range(5)], device=DEVICE)
    with torch.inference_mode(), unchecked_shapes():
        taps = Taps(layers=(0, 1), final=True)
        tapped = model.forward_with_features(tokens, positions, PackedAttention((0, 6, 11)), taps)
    return torch.cat((model.logits(tapped.hidden), tapped.features), 1)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_model_computes_the_same_as_with_the_reference(family: Family, monkeypatch):
    """Logits of standard deviation 1 and features after two layers, in float32."""
    model = tiny_model(family).to(DEVICE)
    plain, mine = (run(model, each, monkeypatch) for each in (TORCH, KERNELS))
    assert not mine.equal(plain), "kernels of its own"
    torch.testing.assert_close(mine, plain, rtol=1e-5, atol=2e-5)
