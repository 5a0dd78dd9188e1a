"""Memory in huge pages."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longtail.model.kernels.linear import Linear
from longtail.system.huge_pages import HugePages

shapes = st.tuples(st.integers(0, 300), st.integers(1, 300))
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.int8])


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.tuples(shapes, dtypes), max_size=12))
def test_tensors_keep_their_values_beside_each_other_and_after_their_arena(sizes):
    pages = HugePages()
    tensors = [pages.empty(shape, dtype) for shape, dtype in sizes]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    del pages
    for number, (tensor, (shape, dtype)) in enumerate(zip(tensors, sizes, strict=True)):
        assert tensor.shape == shape
        assert tensor.dtype == dtype
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 64 == 0
        assert tensor.eq(number).all()


def test_a_tensor_may_be_larger_than_a_chunk():
    pages = HugePages()
    small, large = pages.empty((1,), torch.float32), pages.empty((5 << 20,), torch.float32)
    small.fill_(1.0)
    large.fill_(2.0)
    assert small.item() == 1.0
    assert large.eq(2.0).all()


def test_a_layer_that_is_packed_again_keeps_its_memory():
    layer = Linear(64, 96)
    layer.pack(HugePages())
    if layer.native is None:  # no compiler
        return
    before = layer.native.packed.data_ptr()
    with torch.inference_mode():
        layer.weight.fill_(2.0)
    layer.pack(HugePages())
    assert layer.native is not None
    assert layer.native.packed.data_ptr() == before
    assert layer(torch.ones(1, 64)).eq(128.0).all()
