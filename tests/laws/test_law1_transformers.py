"""Law 1 through transformers' `generate`: its rows, whatever is drafted, and the seed's samples.

The reference is transformers itself where it is greedy, and an engine that decodes plainly where it
samples. Float64, so the law is exact.
"""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from longtail.assembly.engine import completion_key
from longtail.engine.engine import RolloutEngine
from longtail.engine.request import EngineLimits
from longtail.integrations import transformers as ours
from longtail.integrations.transformers import generate
from longtail.model.transformer import Family
from support.engine_requests import request_of
from support.hf_models import EOS, PAD, batch, opened, sampled
from support.tiny_models import tiny_model, tiny_tokenizer

PROMPTS = ("3+4=", "12", "a longer one ", "12")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def model(directory: Path) -> PreTrainedModel:
    return opened(directory)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_greedy_rows_are_those_of_transformers(directory: Path, family: Family) -> None:
    model = opened(directory, family)
    options = dict(do_sample=False, max_new_tokens=40, pad_token_id=PAD)
    batches = [batch(*PROMPTS), batch(PROMPTS[0])]
    expected = [model.generate(**each, **options) for each in batches]
    for drafter in ("none", "history") if family == "qwen3" else ("none",):
        options |= dict(custom_generate=generate, drafter=drafter)
        for inputs, rows in zip(batches, expected, strict=True):
            assert torch.equal(model.generate(**inputs, **options), rows)


def test_a_sample_is_the_text_that_the_engine_writes_for_the_seed(model: PreTrainedModel) -> None:
    limits = EngineLimits(max_running=2, max_step_tokens=64, max_len=128)
    engine = RolloutEngine(tiny_model(dtype=torch.float64), tiny_tokenizer().decode, limits)
    tokens, options = tiny_tokenizer().encode("3+4="), dict(temperature=0.8, top_k=20, top_p=0.9)
    options |= dict(min_p=0.02)
    ends = {"max_tokens": 24, "stop_token_ids": (EOS,)}
    requests = [
        request_of(str(index), tokens, completion_key(3, index), **options, **ends)
        for index in range(2)
    ]
    expected = [list(each.tokens) for each in engine.generate(requests)]
    for drafter in ("none", "history"):
        found = sampled(model, "3+4=", **options, num_return_sequences=2, drafter=drafter)
        assert found == expected


@pytest.mark.slow
def test_changed_weights_are_pulled_into_the_same_engine(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    real = ours.empty_model
    monkeypatch.setattr(ours, "empty_model", lambda *args: made.append(args) or real(*args))
    model = opened(directory)
    before = sampled(model, *PROMPTS, drafter="history")
    assert sampled(model, *PROMPTS, drafter="history") == before
    for parameter in model.parameters():
        parameter.data.mul_(1.05)  # changes no version counter
    options = dict(do_sample=False, max_new_tokens=30, pad_token_id=PAD)
    found = model.generate(**batch(*PROMPTS), **options, custom_generate=generate)
    assert torch.equal(found, model.generate(**batch(*PROMPTS), **options))
    assert sampled(model, *PROMPTS, drafter="history") != before
    assert len(made) == 1
