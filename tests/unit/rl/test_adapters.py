"""Adapters: what is published, what learns, what is kept, and what the reference is."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from end_to_end.workshop import PLAIN, build, say
from longtail.config.rl import LearnerSection, LoraSection, load
from longtail.errors import CheckpointError, ConfigError
from longtail.model.hf.adapters import WEIGHTS_FILE, AdaptedModel
from longtail.model.hf.causal import CausalModel, read_pretrained
from longtail.model.hf.model import load_model
from longtail.model.hf.weights import read_tensors
from longtail.rl import learner as learner_module
from longtail.rl.learner import Learner
from longtail.rl.logprobs import score
from longtail.rl.packing import lay_out
from longtail.rl.policy import open_policy
from longtail.system import tensor_files
from longtail.types import SamplingParams
from support.causal import PROMPTS, TEXTS, batch, random_model

PACKED = lay_out(TEXTS, PROMPTS)
KINDS = ("olmo2", "gemma2", "phi", "gpt_oss", "deepseek_v3")
"""Plain; capped logits; a head with a bias; experts as two kinds of layers."""


def adapted(family: str = "olmo2", seed: int = 0) -> AdaptedModel:
    """A model with adapters that have learned something."""
    model = AdaptedModel(random_model(family), LoraSection(rank=4), seed)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.trainable().items():
        if "lora_B" in name:
            assert not parameter.any(), "new adapters change nothing"
            parameter.data.normal_(0.0, 0.1, generator=generator)
    return model


def logprobs(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return score(model, PACKED, SamplingParams(), max_logits=64 * 7).logprobs


def test_matrices_are_merged_one_by_one(monkeypatch):
    model, merged = adapted("olmo2"), []
    for name, layer in model._adapted.items():
        compute = layer.get_delta_weight
        monkeypatch.setattr(
            layer, "get_delta_weight", lambda *a, f=compute, n=name: merged.append(n) or f(*a)
        )
    counts = []
    for _ in model.published():
        counts.append(len(merged))
    assert counts[0] <= 1
    assert counts[-1] == len(model._adapted)
    assert all(b - a <= 1 for a, b in itertools.pairwise(counts))


@pytest.mark.parametrize("family", KINDS)
def test_published_weights_score_as_the_adapted_model_and_its_reference_as_the_base(
    family, tmp_path
):
    model = adapted(family)
    own = logprobs(model)
    model.save_merged(tmp_path, (1,))
    merged = CausalModel(read_pretrained(tmp_path, torch.float32))
    published = dict(model.published())
    assert all(torch.equal(published.pop(name), tensor) for name, tensor in merged.published())
    assert not published
    assert float((logprobs(merged) - own).abs().max()) < 1e-4
    base = logprobs(CausalModel(random_model(family)))
    assert torch.equal(logprobs(model.reference()), base)
    assert float((own - base).abs().max()) > 0.05
    assert torch.equal(logprobs(model), own), "the adapters are on again"


@pytest.mark.parametrize("family", KINDS)
def test_frozen_matrices_in_the_dtype_of_autocast_change_no_bit(family, monkeypatch):
    settings = LearnerSection(learning_rate=0.01, autocast=True)
    found = []
    for holds in (None, "casts", "frozen"):
        model = adapted(family)
        monkeypatch.setattr(learner_module, "can_hold_casts", lambda _, on=holds: on == "casts")
        if holds == "frozen":
            before = sum(p.nbytes for p in model.model.parameters())
            model.hold_frozen(torch.bfloat16)
            assert sum(p.nbytes for p in model.model.parameters()) < before
        scores = score(model, PACKED, SamplingParams(), autocast=True).logprobs
        learner = Learner(model, settings)
        learner.accumulate(batch().micro_batches[0], batch().sampling)
        learner.step([batch()])
        adapters = {name: p.detach() for name, p in model.trainable().items()}
        found.append((scores, adapters))
        assert all(p.dtype == torch.float32 for p in adapters.values())
    scores, adapters = found[0]
    for same, others in found[1:]:
        assert torch.equal(scores, same)
        assert all(torch.equal(adapters[name], others[name]) for name in adapters)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32], ids=str)
def test_what_is_stored_in_more_bits_is_not_held_in_fewer(stored, tmp_path):
    """Published weights have every bit that is stored."""
    random_model("olmo2").to(stored).save_pretrained(tmp_path)
    words = ["--learner.lora.rank=4", "--learner.autocast=true", f"--model.path={tmp_path}"]
    model = open_policy(tmp_path, load(None, words), "cpu")
    held = {p.dtype for name, p in model.model.named_parameters() if ".base_layer." in name}
    assert held == {stored}
    expected = read_tensors(tmp_path)
    for name, tensor in model.published():
        assert torch.equal(tensor, expected[name].to(tensor.dtype)), name


def test_only_adapters_have_moments_and_gradients_and_the_base_stays():
    model = adapted()
    before = {name: tensor.clone() for name, tensor in model.model.named_parameters()}
    learner = Learner(model, LearnerSection(learning_rate=0.01, kl_coef=0.1))
    report = learner.step([batch(), batch()])
    assert report.metrics["actor/grad_norm"] > 0
    names = model.trainable().keys()
    assert all(".lora_" in name for name in names)
    assert learner.learned().keys() == names
    moments = {name.partition("/")[2] for name in learner.state().tensors}
    assert moments == names
    for name, tensor in model.model.named_parameters():
        assert torch.equal(tensor, before[name]) is (name not in names), name
        assert tensor.grad is None
    weights = dict(learner.published())
    assert not any("lora" in name or "base_layer" in name for name in weights)


def test_a_restored_learner_of_another_process_goes_on_alike(tmp_path):
    settings = LearnerSection(learning_rate=0.01, kl_coef=0.1, gradient_checkpointing=True)
    first = adapted()
    whole = Learner(first, settings)
    whole.step([batch()])
    first.save(tmp_path, ())
    assert {path.name for path in tmp_path.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    other = AdaptedModel(random_model("olmo2"), LoraSection(rank=4), seed=5)
    parts = Learner(other, settings)
    parts.restore(whole.state(), other.read(tmp_path))
    assert whole.step([batch()]).metrics == parts.step([batch()]).metrics
    assert whole.digest() == parts.digest()


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["q_prog"], "q_prog"),
        (["lm_head"], "embedding and head are not adapted"),
        (["embed_tokens"], "embedding and head are not adapted"),
    ],
)
def test_targets_that_cannot_be_adapted_are_refused(targets, message):
    with pytest.raises(ConfigError, match=rf"learner.lora.targets = .*{message}"):
        AdaptedModel(random_model("olmo2"), LoraSection(targets=targets), 0)


def test_adapters_that_are_not_there_are_refused(tmp_path):
    model = adapted()
    with pytest.raises(CheckpointError, match=r"adapter_model.safetensors is not a readable"):
        model.read(tmp_path)
    model.save(tmp_path, ())
    written = tensor_files.read(file := tmp_path / WEIGHTS_FILE)
    name = min(written)
    for other in (written[name].int(), written[name][None], written[name] * torch.nan):
        tensor_files.save(written | {name: other}, file)
        with pytest.raises(CheckpointError, match=name):
            model.read(tmp_path)


def test_lora_with_our_decoder_or_with_shards_is_refused_by_name():
    words = ["--learner.lora.rank=8", "--learner.model=own", "--learner.sharding=full"]
    with pytest.raises(ConfigError) as error:
        load(None, words)
    assert "learner.model = 'own': learner.lora needs" in str(error.value)
    assert "learner.sharding = 'full': learner.lora trains adapters" in str(error.value)


@pytest.mark.slow
def test_a_run_of_adapters_is_merged_and_generates(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shop = build(tmp_path, PLAIN)
    words = ("--run.steps=2", "--learner.lora.rank=4", "--rollout.dtype=float64")
    said = shop.train("run", *words, "--learner.dtype=float64", "--learner.learning_rate=0.1")
    assert said.code == 0, said.err
    assert max(row["training/rollout_logprob_gap_max"] for row in shop.metrics("run")) < 1e-5
    said = say("generate", str(tmp_path / "run"), "--prompt=say 1")
    assert said.code == 2
    assert "it holds adapters alone (learner.lora)" in said.err
    said = say("merge", str(tmp_path / "run"), "--out", str(tmp_path / "whole"))
    assert said.code == 0, said.err
    ours, base = read_tensors(tmp_path / "whole"), read_tensors(shop.model)
    assert ours.keys() == base.keys()
    changed = {name for name in base if not torch.equal(ours[name], base[name].double())}
    assert changed == {name for name in base if "proj" in name}
    assert load_model(tmp_path / "whole").dtype == torch.float64
    said = say("generate", str(tmp_path / "whole"), "--prompt=say 1", "--max-tokens=4")
    assert said.code == 0, said.err
    said = say("merge", str(tmp_path / "run"), "--out", str(tmp_path / "whole"))
    assert "exists; remove it" in said.err
    assert shop.train("full", "--run.steps=1").code == 0
    said = say("merge", str(tmp_path / "full"), "--out", str(tmp_path / "other"))
    assert "it trained all weights (no learner.lora)" in said.err
    said = say("merge", str(tmp_path), "--out", str(tmp_path / "other"))
    assert "it holds no run with a complete checkpoint" in said.err
