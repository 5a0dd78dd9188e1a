"""The limit of generation: a step reads the weights once and multiplies each row with them."""

from dataclasses import replace

import pytest
import torch

from longtail.model import roofline
from longtail.model.roofline import Limit, Machine, limit_of
from longtail.model.transformer import Transformer
from support.tiny_models import tiny_config

SPEED = Machine(flop_per_s=1e9, bytes_per_s=1e8)


@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_those_of_products(tied):
    shape = replace(tiny_config(), tied_embeddings=tied)
    found = limit_of(shape, torch.bfloat16, SPEED)
    model = Transformer(shape)
    count = sum(each.numel() for each in model.parameters())
    count -= 0 if tied else shape.vocab_size * shape.hidden_size
    assert found == Limit(read_s=count * 2 / 1e8, row_s=2 * count / 1e9)
    assert found.free_rows == pytest.approx(10)


def test_drafts_gain_what_is_free():
    found = Limit(read_s=1.0, row_s=0.1)
    assert [found.tokens_per_s(n) for n in (1, 5, 10, 20)] == pytest.approx([1, 5, 10, 10])
    assert [found.gain(n) for n in (1, 4, 10, 20)] == pytest.approx([10, 2.5, 1, 1])
    assert found.sentence(16).endswith("at most 1.0x with 16, 2.5x with 4, 10.0x with 1 running")


def test_the_fastest_of_several_measurements_counts(monkeypatch):
    clock = iter([0.0, *(0.0, 0.2), *(0.2, 0.3), 0.5] * 2)  # end, begin and end of each, too late
    for name, value in {"now": lambda device: next(clock), "_SIDE": 8, "_BYTES": 64}.items():
        monkeypatch.setattr(roofline, name, value)
    speed = roofline.measure(torch.device("cpu"), torch.float32)
    assert speed.flop_per_s == pytest.approx(2 * 8**3 / 0.1)
    assert speed.bytes_per_s == pytest.approx(64 / 0.1)
