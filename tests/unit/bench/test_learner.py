"""`longtail bench learner`: every contestant makes the same step."""

import json
from pathlib import Path

import pytest

from longtail.bench import learner
from longtail.bench.options import LearnerBenchOptions
from longtail.model.hf.model import save_model
from support.tiny_models import tiny_model


@pytest.mark.slow
def test_a_step_of_a_model_makes_the_gradient_of_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(tiny_model("llama"), tmp_path)
    words = ("--rollout.prompts_per_step=4", "--rollout.group_size=4")
    overrides = (f"--model.path={tmp_path}", "--learner.tokens_per_micro_batch=64", *words)
    options = LearnerBenchOptions(mean_tokens=10, prompt_tokens=4, repeats=1, overrides=overrides)
    assert learner.run(options) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["over_products"]["median"] > 1
    assert result["transformers_ratio"]["median"] > 0
    norms = result["grad_norm"]
    assert norms["longtail"] == pytest.approx(norms["transformers"], rel=0.1)
    assert norms["longtail"] == pytest.approx(norms["modelled"], rel=0.1)
    assert result["state_mb"]["adapters"] < result["state_mb"]["modelled"]


def test_the_products_of_a_step_are_counted() -> None:
    options = LearnerBenchOptions(mean_tokens=10, prompt_tokens=4)
    model = tiny_model("llama")
    batch = learner.make_batch(options, 16, model.config.vocab_size)
    packed = batch.packed(64)
    kept = [i for i, advantage in enumerate(batch.advantages) if advantage]
    assert kept == list(range(8)), "the second group of eight has no advantage"
    products = learner.Products(model, packed)
    inside = sum(p.numel() for n, p in model.named_parameters() if "layers" in n and p.dim() == 2)
    tokens = sum(len(batch.texts[i]) for i in kept)
    head = model.head.weight.numel()
    assert products.flops == 6 * (tokens * inside + (tokens - 4 * 8) * head)
