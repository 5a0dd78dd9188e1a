"""The tiled product is the product, whatever the number of rows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longtail.model import native
from longtail.model.linear import Linear

pytestmark = pytest.mark.skipif(native.product() is None, reason="needs AMX and a C compiler")


@given(
    rows=st.integers(1, 100),
    inputs=st.integers(1, 6).map(lambda n: 32 * n),
    outputs=st.integers(1, 6).map(lambda n: 32 * n),
    bias=st.booleans(),
    threads=st.sampled_from([1, 2]),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=60, deadline=None)
def test_a_packed_layer_gives_the_product_to_one_rounding(
    rows: int, inputs: int, outputs: int, bias: bool, threads: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    layer = Linear(inputs, outputs, bias=bias)
    with torch.no_grad():
        layer.weight.normal_(generator=generator)
        if layer.bias is not None:
            layer.bias.normal_(generator=generator)
    layer = layer.bfloat16()
    x = torch.randn(rows, inputs, generator=generator).bfloat16()
    with torch.no_grad():
        exact = x.double() @ layer.weight.double().T
        if layer.bias is not None:
            exact += layer.bias.double()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        layer.pack()
        with torch.inference_mode():
            out = layer(x)
    finally:
        torch.set_num_threads(before)
    # one rounding to bfloat16 (half of 2^-8, relative) and float32 sums of up to 192 terms of
    # size about 1, whose error is absolute
    torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=1e-3)


def test_a_changed_weight_is_packed_anew() -> None:
    layer = Linear(32, 64).bfloat16()
    with torch.inference_mode():
        layer.weight.fill_(1.0)
        layer.pack()
        assert layer(torch.ones(1, 32).bfloat16()).eq(32.0).all()
        layer.weight.fill_(2.0)
        layer.pack()
        assert layer(torch.ones(1, 32).bfloat16()).eq(64.0).all()
