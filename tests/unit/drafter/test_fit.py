"""The closed-form start of a drafter: its regressions, and its place in training."""

import math

import pytest
import torch

from longtail.config.sections import OptimizerSection
from longtail.drafter.eagle.fit import RIDGE, FeatureFit, ridge
from longtail.drafter.eagle.fresh import fresh_drafter
from longtail.drafter.eagle.layer import EagleConfig
from longtail.drafter.training.buffer import DrafterBuffer
from longtail.drafter.training.replica import Replica
from longtail.drafter.training.spot import SpotSettings, SpotTrainer
from longtail.drafter.training.texts import pack_texts
from longtail.drafter.training.trainer import DrafterTrainer, TrainerSettings
from longtail.drafter.weights import DrafterWeights, copy_parameters
from longtail.errors import CheckpointError
from longtail.rl.data.examples import Example
from longtail.types import PackedSequences
from support.spot_training import make_buffer
from support.tiny_models import tiny_model

_FIT = 120
_LONG = TrainerSettings(unroll_steps=2, fit_tokens=10**6)
"""A start that does not end in a test."""
SETTINGS = TrainerSettings(
    unroll_steps=2, fit_tokens=_FIT, optimizer=OptimizerSection(learning_rate=1e-3)
)


def _batch(number: int, count: int = 4) -> list[PackedSequences]:
    generator = torch.Generator().manual_seed(number)
    drawn = torch.randint(5, 45, (count, 20), generator=generator).tolist()
    return pack_texts([Example(tokens=tuple(each), prompt_len=3) for each in drawn], 50)


def _trainer(settings: TrainerSettings = SETTINGS) -> DrafterTrainer:
    target = tiny_model(dtype=torch.float64)
    config = EagleConfig(recipe="eagle1", target=target.config, window=8)
    generator = torch.Generator().manual_seed(3)
    layer = fresh_drafter(config, target, _batch(0)[0], generator).double()
    return DrafterTrainer(layer, target, settings)


def test_the_regression_is_that_of_augmented_least_squares() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(500, 6, generator=generator, dtype=torch.float64) * torch.arange(1, 7)
    wanted = torch.randn(500, 3, generator=generator, dtype=torch.float64)
    size = inputs.square().mean(0).sqrt()
    rows = torch.cat((inputs / size, RIDGE**0.5 * torch.eye(6, dtype=torch.float64)))
    padded = torch.cat((wanted, wanted.new_zeros(6, 3)))
    expected = torch.linalg.lstsq(rows, padded).solution / size[:, None]
    found = ridge(inputs.T @ inputs, inputs.T @ wanted, len(inputs))
    torch.testing.assert_close(found, expected)


def test_a_fitted_layer_predicts_the_next_feature() -> None:
    trainer = _trainer(TrainerSettings(unroll_steps=2, fit_tokens=10**6))
    before = trainer.evaluate(_batch(99))
    trainer.step(_batch(1, 60))
    trainer.step(_batch(2))  # the first batch is fitted before the second is read
    after = trainer.evaluate(_batch(99))
    assert after.overlap[0] > before.overlap[0] + 0.02


def test_gradient_steps_follow_when_the_tokens_of_the_start_are_read() -> None:
    trainer = _trainer()
    rates, trained = [], 0
    for number in range(4):
        report = trainer.step(_batch(number))
        trained += report.num_trained
        rates.append(report.learning_rate)
    assert trained == 4 * 4 * 17
    assert rates == [0.0, 0.0, 1e-3, 1e-3]
    assert trainer.steps == 4


def test_a_stopped_start_changes_nothing() -> None:
    whole, cut = _trainer(_LONG), _trainer(_LONG)
    for trainer in (whole, cut):
        trainer.step(_batch(0, 20))  # enough rows for a solution, with which the next step begins
    whole.step(_batch(1))
    before = cut.tensors()
    assert cut.try_step(_batch(1), lambda: True) is None
    after = cut.tensors()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    for allowed in range(20):  # a stopped solution is continued, not begun again
        calls = iter([False] * allowed + [True])
        if cut.try_step(_batch(1), lambda calls=calls: next(calls)) is not None:
            break
    expected, found = whole.tensors(), cut.tensors()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_start_is_resumed_bit_for_bit(steps: int) -> None:
    whole, first, second = (_trainer() for _ in range(3))
    for number in range(4):
        whole.step(_batch(number))
    for number in range(steps):
        first.step(_batch(number))
    second.restore(first.steps, first.tensors())
    for number in range(steps, 4):
        second.step(_batch(number))
    expected, found = whole.tensors(), second.tensors()
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_rows_of_another_drafter_are_refused() -> None:
    trainer = _trainer()
    rows = {"rows": torch.zeros(3, 7), "num_fitted": torch.tensor(0)}
    with pytest.raises(CheckpointError, match="rows of the start"):
        FeatureFit.restored(trainer.layer, trainer._target, rows)


def _spot(version: int, num_tokens: int = 0, settings: TrainerSettings = SETTINGS) -> SpotTrainer:
    trainer = _trainer(settings)
    spot_settings = SpotSettings(
        trainer=settings,
        batch_tokens=60,
        tokens_per_micro_batch=60,
        heldout_tokens=60,
        num_depths=2,
        measure_every=3,
        min_gain=0.0,
        patience=3,
    )
    spot = SpotTrainer(trainer.layer, trainer._target, spot_settings)
    tensors = copy_parameters(trainer.layer)
    spot.begin(DrafterWeights(version=version, tensors=tensors, num_tokens=num_tokens))
    return spot


def test_a_drafter_of_many_tokens_gets_no_closed_form_start() -> None:
    assert _spot(0)._trainer.is_starting
    assert _spot(1, 1000)._trainer.is_starting, "a worker that joins late may soon know more texts"
    assert not _spot(4, 5000)._trainer.is_starting


def test_the_first_start_is_measured_beside_a_drafter_without_an_accepted_token() -> None:
    spot, measured = _spot(0, settings=_LONG), list[Replica]()
    spot.train(make_buffer(200), lambda: bool(measured), measured.append)
    (found,) = measured
    assert found.base_accept_len == 1.0
    assert found.accept_len > 1.0
    late, again = _spot(1, 1000, _LONG), list[Replica]()
    late.train(make_buffer(200), lambda: bool(again), again.append)
    assert again[0].accept_len == found.accept_len
    assert again[0].base_accept_len > 1.0, "of a published drafter, measured"


def test_a_start_is_measured_as_soon_as_a_text_is_held_out() -> None:
    spot, measured = _spot(0, settings=_LONG), list[Replica]()
    everything = make_buffer(200)
    trained = DrafterBuffer(10**6, seed=4)
    held = {each.tokens for each in everything.heldout(10**6)}
    trained.add(each for each in everything.snapshots() if each.tokens not in held)
    spot.train(trained, lambda: bool(measured), measured.append)
    assert math.isnan(measured.pop().accept_len)
    num_fitted = spot._trainer.num_fitted
    trained.add(everything.snapshots())
    spot.train(trained, lambda: bool(measured), measured.append)
    assert measured[0].accept_len > 1.0
    assert spot._trainer.num_fitted == num_fitted, "no further solution was waited for"
