"""The limit of generation: a step reads the weights once and multiplies each row with them."""

from dataclasses import replace

import pytest
import torch

from longtail.model.limit import Limit, Machine, limit_of, measure
from longtail.model.transformer import Transformer
from support.tiny_models import tiny_config

SPEED = Machine(flop_per_s=1e9, bytes_per_s=1e8)


@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_those_of_products(tied):
    shape = replace(tiny_config(), tied_embeddings=tied)
    limit = limit_of(shape, torch.bfloat16, SPEED)
    model = Transformer(shape)
    count = sum(each.numel() for each in model.parameters())
    count -= 0 if tied else shape.vocab_size * shape.hidden_size
    assert limit == Limit(read_s=count * 2 / 1e8, row_s=2 * count / 1e9)
    assert limit.free_rows == pytest.approx(10)


def test_drafts_gain_what_is_free():
    limit = Limit(read_s=1.0, row_s=0.1)
    assert [limit.tokens_per_s(n) for n in (1, 5, 10, 20)] == pytest.approx([1, 5, 10, 10])
    assert [limit.gain(n) for n in (1, 4, 10, 20)] == pytest.approx([10, 2.5, 1, 1])
    found = limit.sentence(16)
    assert found.endswith("at most 1.0x with 16, 2.5x with 4, 10.0x with 1 running")


def test_a_machine_is_measured():
    speed = measure(torch.device("cpu"), torch.float32)
    assert speed.flop_per_s > speed.bytes_per_s > 0
