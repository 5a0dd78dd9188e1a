"""The native product is the product, and its rows do not know how many they are."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from longtail.model.kernels.linear import Linear
from support.tiny_models import NATIVE_DTYPES

sizes = settings(max_examples=60, deadline=None)
seeds, threads = st.integers(0, 2**31), st.sampled_from([1, 2])
tiles = st.integers(1, 6).map(lambda n: 32 * n)


def make_layer(
    inputs: int, outputs: int, *, bias: bool, dtype: torch.dtype, generator: torch.Generator
) -> Linear:
    layer = Linear(inputs, outputs, bias=bias)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(generator=generator)
    layer = layer.to(dtype)
    layer.pack()
    return layer


def apply(layer: Linear, x: Tensor, num_threads: int = 1) -> Tensor:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        with torch.inference_mode():
            return layer(x)
    finally:
        torch.set_num_threads(before)


def assert_is_product(layer: Linear, x: Tensor, out: Tensor) -> None:
    """n terms summed in float32, in any order: off by n 2^-24 of the sum of their sizes at most.

    A bfloat16 result is then rounded to 8 bits: by 2^-8 of itself. The bias is one term more.
    """
    with torch.no_grad():
        exact = x.double() @ layer.weight.double().T
        terms = x.double().abs() @ layer.weight.double().abs().T
        if layer.bias is not None:
            exact, terms = exact + layer.bias.double(), terms + layer.bias.double().abs()
        stored = 2.0**-8 if out.dtype == torch.bfloat16 else 0.0
        allowed = 2.0**-24 * (layer.weight.shape[1] + 1) * terms * (1 + stored)
        excess = (out.double() - exact).abs() - 1.001 * (allowed + stored * exact.abs())
    assert out.isfinite().all()
    assert float(excess.max()) <= 0, f"off by {float(excess.max())} more than allowed"


@pytest.mark.parametrize("dtype", NATIVE_DTYPES)
@sizes
@given(
    rows=st.integers(1, 100),
    inputs=st.one_of(tiles, st.integers(1, 200)),
    outputs=st.one_of(tiles, st.integers(1, 200)),
    bias=st.booleans(),
    threads=threads,
    seed=seeds,
)
def test_a_packed_layer_gives_the_product(dtype, rows, inputs, outputs, bias, threads, seed):
    generator = torch.Generator().manual_seed(seed)
    layer = make_layer(inputs, outputs, bias=bias, dtype=dtype, generator=generator)
    assume(layer.native is not None)  # pairs of bfloat16 need an even number of inputs
    x = torch.randn(rows, inputs, generator=generator).to(dtype)
    assert_is_product(layer, x, apply(layer, x, threads))


@pytest.mark.parametrize("dtype", NATIVE_DTYPES)
@settings(max_examples=25, deadline=None)
@given(
    inputs=st.integers(1, 200),
    outputs=st.one_of(tiles, st.integers(1, 200)),
    bias=st.booleans(),
    threads=threads,
    seed=seeds,
)
def test_a_row_has_the_same_bits_in_any_batch(dtype, inputs, outputs, bias, threads, seed):
    """Alone, or among any number of others, wherever it stands."""
    generator = torch.Generator().manual_seed(seed)
    layer = make_layer(inputs, outputs, bias=bias, dtype=dtype, generator=generator)
    assume(layer.native is not None)  # pairs of bfloat16 need an even number of inputs
    x = torch.randn(64, inputs, generator=generator).to(dtype)
    whole = apply(layer, x, threads)
    for row in range(len(x)):
        assert apply(layer, x[row : row + 1]).equal(whole[row : row + 1])
    for count in range(1, len(x) + 1):  # each row sits elsewhere in its tile
        start = len(x) - count
        assert apply(layer, x[start:].contiguous()).equal(whole[start:])


@pytest.mark.parametrize("dtype", NATIVE_DTYPES)
def test_a_value_that_is_not_finite_stays_in_its_row(dtype):
    generator = torch.Generator().manual_seed(0)
    layer = make_layer(64, 96, bias=True, dtype=dtype, generator=generator)
    x = torch.randn(14, 64, generator=generator).to(dtype)
    x[3, 7], x[13, 0] = torch.nan, torch.inf
    finite = apply(layer, x).isfinite()
    assert not finite[[3, 13]].any()
    assert finite[[row for row in range(14) if row not in (3, 13)]].all()
