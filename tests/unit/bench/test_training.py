"""The benchmarks of training: every layout does the same work."""

import json
from pathlib import Path

import pytest

from longtail.bench.training import drafter, learner, step
from longtail.bench.training.options import DrafterBenchOptions, LearnerBenchOptions
from longtail.bench.training.workload import LAYOUTS, PROMPT_LEN, Workload
from longtail.errors import ConfigError
from longtail.model.hf.model import save_model
from support.tiny_models import tiny_model

SMALL = Workload(sequences=8, rows=3, budget=120, threads=1, median=11.0)


def test_every_layout_makes_the_same_gradient_of_the_learner():
    assert learner.gradient_gap(SMALL) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["eagle1", "eagle3"])
def test_every_layout_makes_the_same_gradient_of_the_drafter(recipe: str) -> None:
    work = Workload(sequences=6, rows=3, budget=200, threads=1, median=5.5)
    assert drafter.gradient_gap(work, recipe, 2) < 1e-10


@pytest.mark.slow
def test_the_last_line_of_the_drafter_benchmark_is_json_with_the_ratio(
    capsys: pytest.CaptureFixture[str],
) -> None:
    work = Workload(sequences=6, rows=3, budget=100, threads=1, median=6.0)
    assert drafter.run(DrafterBenchOptions(repeats=1, unroll_steps=2), work) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["packed_ratio"] > 0
    assert set(result["samples_per_second"]) == set(LAYOUTS)


@pytest.mark.slow
def test_a_step_of_a_model_makes_the_gradient_of_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(tiny_model("llama"), tmp_path)
    options = LearnerBenchOptions(
        model=str(tmp_path), completions=16, mean_tokens=10, prompt_tokens=4, repeats=1, budget=64
    )
    assert learner.run(options) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["over_products"]["median"] > 1
    assert result["transformers_ratio"]["median"] > 0
    norms = result["grad_norm"]
    assert norms["longtail"] == pytest.approx(norms["transformers"], rel=0.1)


@pytest.mark.slow
def test_kept_states_make_the_same_updates_of_a_drafter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(tiny_model("llama"), tmp_path)
    options = DrafterBenchOptions(
        model=str(tmp_path), mean_tokens=30, prompt_tokens=4, repeats=1, threads=1
    )
    assert drafter.run(options) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["reused_share"] == 1.0
    assert result["losses"]["kept"] == pytest.approx(result["losses"]["computed"], rel=0.02)
    assert result["tokens_per_s"]["kept"]["median"] > 0


def test_another_trainer_needs_a_model() -> None:
    with pytest.raises(ConfigError, match="--peer-python"):
        learner.run(LearnerBenchOptions(peer_python="python"))


def test_the_products_of_a_step_are_counted() -> None:
    options = LearnerBenchOptions(completions=16, mean_tokens=10, prompt_tokens=4)
    model = tiny_model("llama")
    batch = step.make_batch(options, model.config.vocab_size)
    packed = batch.packed(64)
    assert sorted(batch.kept) == list(range(8)), "the second group of eight has no advantage"
    products = step.Products(model, packed)
    inside = sum(p.numel() for n, p in model.named_parameters() if "layers" in n and p.dim() == 2)
    tokens = sum(len(batch.texts[i]) for i in batch.kept)
    head = model.head.weight.numel()
    assert products.flops == 6 * (tokens * inside + (tokens - 4 * 8) * head)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_trains_the_same_tokens(layout):
    batch = SMALL.batch(layout)
    trained = []
    for one in batch.micro_batches:
        trained.extend(one.packed.tokens[one.packed.loss_mask.bool()].tolist())
    expected = [token for text in SMALL.texts() for token in text[PROMPT_LEN:]]
    assert sorted(trained) == sorted(expected)
    assert batch.num_generated == len(expected)


@pytest.mark.parametrize("layout", ["padded", "padded_budget", "padded_sorted"])
def test_padding_makes_the_sequences_of_a_micro_batch_equal(layout):
    for one in SMALL.batch(layout).micro_batches:
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
