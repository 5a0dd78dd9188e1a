"""The drafter trainer: updates, the read-only target, exact resume; draft vocabularies."""

from dataclasses import replace

import pytest
import torch

from longtail.config.sections import OptimizerSection
from longtail.drafter.eagle.fresh import commonest_tokens, fresh_drafter
from longtail.drafter.eagle.layer import EagleConfig, Recipe
from longtail.drafter.eagle.trainer import DrafterTrainer, TrainerSettings
from longtail.errors import CheckpointError, DataError
from longtail.model.kernels import training_products
from longtail.model.transformer import Transformer
from longtail.programs.drafter_data import read_sequences, save_sequences
from longtail.rl import muon
from longtail.rl.data.examples import Example
from longtail.rl.packing import pack_sequences
from longtail.types import PackedSequences
from support.processors import HalfProducts
from support.spot_training import same
from support.tiny_models import tiny_model

SETTINGS = TrainerSettings(unroll_steps=3, optimizer=OptimizerSection(learning_rate=1e-2))
RECIPES: tuple[Recipe, ...] = ("eagle1", "eagle3")


def _texts() -> list[Example]:
    """Make texts that count upwards by one of two steps."""
    return [
        Example(tokens=tuple(7 * n + 5 + (1 + n % 2) * i for i in range(8 + 5 * n)), prompt_len=3)
        for n in range(6)
    ]


def _trainer(
    recipe: Recipe = "eagle3",
    *,
    target: Transformer | None = None,
    settings: TrainerSettings = SETTINGS,
    dtype: torch.dtype = torch.float32,
) -> DrafterTrainer:
    target = target or tiny_model(dtype=dtype)
    layers = (0, 1) if recipe == "eagle3" else ()
    config = EagleConfig(recipe=recipe, target=target.config, layers=layers, window=8)
    generator = torch.Generator().manual_seed(3)
    layer = fresh_drafter(config, target, pack_sequences(_texts(), 100)[0], generator).to(dtype)
    return DrafterTrainer(layer, target, settings)


def _batch(budget: int = 1000) -> list[PackedSequences]:
    return pack_sequences(_texts(), budget)


def test_the_target_is_never_written() -> None:
    target = tiny_model().requires_grad_(True)
    before = {name: p.detach().clone() for name, p in target.named_parameters()}
    _trainer(target=target).step(_batch())
    for name, parameter in target.named_parameters():
        assert parameter.grad is None, name
        assert torch.equal(parameter, before[name]), name


@pytest.mark.parametrize("recipe", RECIPES)
def test_micro_batches_do_not_change_the_update(recipe: Recipe) -> None:
    trainers = [_trainer(recipe, dtype=torch.float64) for _ in range(2)]
    reports = [t.step(_batch(budget)) for t, budget in zip(trainers, (1000, 30), strict=True)]
    assert reports[0].loss == pytest.approx(reports[1].loss, rel=1e-12)
    expected, found = (trainer.weights() for trainer in trainers)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_a_state_of_another_drafter_is_refused_before_anything_changes() -> None:
    trainer, other = _trainer("eagle3"), _trainer("eagle1")
    before = trainer.tensors()
    with pytest.raises(CheckpointError, match="another drafter"):
        trainer.restore(1, other.tensors())
    assert same(trainer.tensors(), before)


def test_the_most_frequent_tokens_are_counted_in_completions() -> None:
    texts = [
        Example(tokens=(1, 1, 1, 7, 9, 9), prompt_len=3),
        Example(tokens=(1, 9, 5), prompt_len=1),
    ]
    assert commonest_tokens(texts, 2).tolist() == [5, 9]
    assert commonest_tokens(texts, 2, always=(3,)).tolist() == [3, 9]
    assert commonest_tokens(texts, 5).tolist() == [0, 1, 5, 7, 9]


def test_too_short_texts_are_refused_with_a_remedy() -> None:
    with pytest.raises(DataError, match=r"2 tokens deep.*unroll_steps"):
        _trainer().step(pack_sequences([Example(tokens=(5, 6, 7), prompt_len=1)], 100))


def test_depths_beyond_the_trained_ones_are_measured_up_to_the_texts_length() -> None:
    trainer, texts = _trainer(), [Example(tokens=tuple(range(5, 12)), prompt_len=1)]
    assert len(trainer.evaluate(pack_sequences(texts, 100), 3).overlap) == 3
    deep = trainer.evaluate(pack_sequences(texts, 100), 9)
    assert len(deep.overlap) == 5  # seven tokens, two of them in the first pair
    assert deep.overlap[:3] == trainer.evaluate(pack_sequences(texts, 100), 3).overlap


@pytest.mark.parametrize(("recipe", "matrix_rate"), [("eagle1", None), ("eagle3", 0.02)])
def test_no_product_is_emulated_over_a_bfloat16_target(recipe, matrix_rate, monkeypatch) -> None:
    settings = replace(SETTINGS, matrix_rate=matrix_rate)
    exact = _trainer(recipe, settings=settings)
    for module in (training_products, muon):
        monkeypatch.setattr(module, "multiplies_bfloat16", lambda device: False)
    target = tiny_model(dtype=torch.bfloat16)
    trainer = _trainer(recipe, settings=settings, target=target)
    with HalfProducts() as half:
        report = trainer.step(_batch())
    assert half.found == []
    assert report.loss == pytest.approx(exact.step(_batch()).loss, rel=0.02)
    monkeypatch.undo()
    with HalfProducts() as half:
        _trainer(settings=replace(settings, autocast=True)).step(_batch())
    assert half.found, "products are seen"


def test_texts_are_read_back_for_the_same_origin_only(tmp_path) -> None:
    file = tmp_path / "texts.jsonl"
    assert read_sequences(file, "a") is None
    save_sequences(file, _texts(), "a")
    assert read_sequences(file, "a") == _texts()
    assert read_sequences(file, "b") is None
    file.write_text(file.read_text()[:-9])
    with pytest.raises(DataError, match="damaged"):
        read_sequences(file, "a")
