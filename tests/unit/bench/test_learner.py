"""The learner's benchmark compares like with like."""

import pytest

from longtail.bench.training.learner import (
    LAYOUTS,
    PROMPT_LEN,
    Workload,
    gradient_gap,
    layout_batch,
)

SMALL = Workload(sequences=8, rows=3, budget=120, threads=1, scale=0.1)


def test_every_layout_makes_the_same_gradient():
    assert gradient_gap(SMALL) < 1e-10


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_trains_the_same_tokens(layout):
    batch = layout_batch(SMALL, layout)
    trained = []
    for one in batch.micro_batches:
        trained.extend(one.packed.tokens[one.packed.loss_mask.bool()].tolist())
    expected = [token for text in SMALL.texts() for token in text[PROMPT_LEN:]]
    assert sorted(trained) == sorted(expected)
    assert batch.num_generated == len(expected)


@pytest.mark.parametrize("layout", ["padded", "padded_budget", "padded_sorted"])
def test_padding_makes_the_sequences_of_a_micro_batch_equal(layout):
    for one in layout_batch(SMALL, layout).micro_batches:
        assert one.packed.num_tokens % one.packed.num_sequences == 0
        if layout != "padded" and one.packed.num_sequences > 1:
            assert one.packed.num_tokens <= SMALL.budget


def test_the_lengths_have_a_heavy_tail():
    lengths = sorted(
        len(text) - PROMPT_LEN
        for text in Workload(sequences=32, rows=8, budget=4096, threads=1).texts()
    )
    assert lengths[-1] >= 8 * lengths[len(lengths) // 2]
    assert 1000 <= lengths[-1] <= 1500
