"""`custom_generate` of transformers: its texts, its keys, and the options that are refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.generation import StoppingCriteriaList, StopStringCriteria

from longtail.build.engine import completion_key
from longtail.engine.engine import RolloutEngine
from longtail.engine.limits import EngineLimits
from longtail.errors import ConfigError, RequestError
from longtail.integrations import transformers as ours
from longtail.integrations.transformers import generate
from longtail.model.hf.model import save_model
from longtail.model.transformer import Family
from longtail.types import Request, SamplingParams
from support.tiny_models import tiny_model, tiny_tokenizer

PAD, EOS = 0, 1
PROMPTS = ("3+4=", "12", "a longer one ", "12")


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Family], PreTrainedModel]:
    """Return a function that loads a fresh model of a family with transformers, in float64."""
    root = tmp_path_factory.mktemp("models")

    def load(family: Family = "qwen3") -> PreTrainedModel:
        path: Path = root / family
        if not path.is_dir():
            save_model(tiny_model(family), path, eos_ids=(EOS,))
            tiny_tokenizer().save(path)
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)

    return load


@pytest.fixture(scope="module")
def model(opened: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    return opened()


def batch(*prompts: str) -> dict[str, Tensor]:
    """Return prompts as a batch padded on the left."""
    rows = [tiny_tokenizer().encode(prompt) for prompt in prompts]
    width = max(map(len, rows))
    ids = [[PAD] * (width - len(row)) + list(row) for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def sampled(model: PreTrainedModel, *prompts: str, **more: Any) -> list[list[int]]:
    """Return what each row samples, without prompt and padding."""
    inputs = batch(*prompts)
    options = dict(do_sample=True, max_new_tokens=24, pad_token_id=PAD, seed=3, drafter="none")
    rows = model.generate(**inputs, custom_generate=generate, **options | more)
    rows = rows[:, inputs["input_ids"].shape[1] :].tolist()
    return [row[: row.index(EOS) + 1] if EOS in row else row for row in rows]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_greedy_rows_are_those_of_transformers(
    opened: Callable[[Family], PreTrainedModel], family: Family
) -> None:
    model = opened(family)
    options = dict(do_sample=False, max_new_tokens=40, pad_token_id=PAD)
    batches = [batch(*PROMPTS), batch(PROMPTS[0])]
    expected = [model.generate(**each, **options) for each in batches]
    for drafter in ("none", "history") if family == "qwen3" else ("none",):
        options |= dict(custom_generate=generate, drafter=drafter)
        for inputs, rows in zip(batches, expected, strict=True):
            assert torch.equal(model.generate(**inputs, **options), rows)


@pytest.mark.slow
def test_a_sample_depends_on_its_seed_and_index_and_on_no_drafter_or_neighbour(
    model: PreTrainedModel,
) -> None:
    rows = sampled(model, *PROMPTS)
    assert rows == sampled(model, *PROMPTS, drafter="history")
    assert rows[1] != rows[3]  # the second sample of the same prompt
    assert rows[:2] == sampled(model, *PROMPTS[:2])
    assert [rows[1], rows[3]] == sampled(model, "12", num_return_sequences=2)
    assert rows != sampled(model, *PROMPTS, seed=4)


def test_a_sample_is_the_text_that_the_engine_writes_for_the_seed(model: PreTrainedModel) -> None:
    limits = EngineLimits(max_running=2, max_step_tokens=64, max_len=128)
    engine = RolloutEngine(tiny_model(dtype=torch.float64), tiny_tokenizer().decode, limits)
    sampling = SamplingParams(
        temperature=0.8, top_k=20, top_p=0.9, min_p=0.02, max_tokens=24, stop_token_ids=(EOS,)
    )
    tokens = tiny_tokenizer().encode("3+4=")
    requests = [
        Request(
            request_id=str(index),
            prompt_tokens=tokens,
            noise_key=completion_key(3, index),
            sampling=sampling,
        )
        for index in range(2)
    ]
    expected = [list(each.tokens) for each in engine.generate(requests)]
    options = dict(temperature=0.8, top_k=20, top_p=0.9, min_p=0.02, num_return_sequences=2)
    assert sampled(model, "3+4=", **options) == expected


def test_without_a_seed_torchs_generator_decides(model: PreTrainedModel) -> None:
    with torch.random.fork_rng():
        drawn = []
        for state in (5, 5, 6):
            torch.default_generator.manual_seed(state)
            drawn.append(sampled(model, "3+4=", seed=None))
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.slow
def test_changed_weights_are_pulled_into_the_same_engine(
    opened: Callable[[], PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    real = ours.empty_model
    monkeypatch.setattr(ours, "empty_model", lambda *args: made.append(args) or real(*args))
    model = opened()
    before = sampled(model, *PROMPTS, drafter="history")
    assert sampled(model, *PROMPTS, drafter="history") == before
    for parameter in model.parameters():
        parameter.data.mul_(1.05)  # changes no version counter
    options = dict(do_sample=False, max_new_tokens=30, pad_token_id=PAD)
    found = model.generate(**batch(*PROMPTS), **options, custom_generate=generate)
    assert torch.equal(found, model.generate(**batch(*PROMPTS), **options))
    assert sampled(model, *PROMPTS, drafter="history") != before
    assert len(made) == 1


@pytest.mark.slow
def test_a_record_has_logprobs_and_speculation_counts(model: PreTrainedModel) -> None:
    inputs = batch("3+4=", "12")
    options = dict(do_sample=True, top_k=0, max_new_tokens=16, pad_token_id=PAD, seed=1)
    found = model.generate(
        **inputs, **options, custom_generate=generate, return_dict_in_generate=True
    )
    width, kept = inputs["input_ids"].shape[1], found.sequences != PAD
    logits = model(found.sequences[:1], attention_mask=kept[:1].long()).logits
    tokens = found.sequences[0, width:]
    expected = logits[0, width - 1 : -1].log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    length = int(kept[0, width:].sum())
    torch.testing.assert_close(found.logprobs[0, :length].double(), expected[:length])
    assert found.scores is None
    assert found.num_accepted <= found.num_drafted


@pytest.mark.parametrize("stop", ["1", "ab", "\n"])
def test_stop_strings_and_other_criteria_end_rows_where_they_do_in_transformers(
    model: PreTrainedModel, stop: str
) -> None:
    def after_ten(input_ids: Tensor, scores: object, **_: Any) -> Tensor:
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= 23)

    inner = tiny_tokenizer()._inner
    criteria = StoppingCriteriaList([StopStringCriteria(inner, [stop]), after_ten])
    options = dict(do_sample=False, max_new_tokens=40, pad_token_id=PAD)
    options["stopping_criteria"] = criteria
    expected = model.generate(**batch(*PROMPTS), **options)
    options |= dict(custom_generate=generate, drafter="none")
    found = model.generate(**batch(*PROMPTS), **options)
    assert torch.equal(found, expected)
    assert found.shape[1] <= 23


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"output_scores": True}, "output_scores"),
        ({"output_logits": True}, "output_logits"),
        ({"output_attentions": True}, "output_attentions"),
        ({"output_hidden_states": True}, "output_hidden_states"),
        ({"num_beams": 2}, "beam_search"),
        ({"prompt_lookup_num_tokens": 3}, "assisted_generation"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"no_repeat_ngram_size": 2}, "no_repeat_ngram_size"),
        ({"min_new_tokens": 2}, "min_new_tokens"),
        ({"bad_words_ids": [[5]]}, "bad_words_ids"),
        ({"suppress_tokens": [5]}, "suppress_tokens"),
        ({"typical_p": 0.5, "do_sample": True}, "typical_p"),
        ({"logits_processor": [lambda ids, scores: scores]}, "logits_processor"),
        ({"max_time": 3.0}, "max_time"),
        ({"drafter": "nowhere"}, "drafter = 'nowhere'"),
        ({"position_ids": torch.tensor([[5, 6, 7, 8]])}, "position_ids"),
    ],
)
def test_an_option_that_the_engine_lacks_is_refused_by_its_name(
    model: PreTrainedModel, options: dict[str, Any], name: str
) -> None:
    with pytest.raises(ConfigError, match=name):
        model.generate(**batch("3+4="), custom_generate=generate, max_new_tokens=4, **options)


def test_right_padding_empty_prompts_and_too_long_texts_are_refused(model: PreTrainedModel) -> None:
    inputs = batch("3+4=", "12")
    options = dict(custom_generate=generate, max_new_tokens=4, pad_token_id=PAD)
    for mask in (inputs["attention_mask"].flip(1), inputs["attention_mask"] * 0):
        with pytest.raises(ConfigError, match="pad on the left"):
            model.generate(inputs["input_ids"], attention_mask=mask, **options)
    with pytest.raises(RequestError, match="the model has 508 of its 512 positions left"):
        model.generate(**inputs, **options | {"max_new_tokens": 509})
    longest = model.generate(**inputs, **options | {"max_new_tokens": 508})
    assert longest.shape[1] <= 512


def test_a_model_with_an_adapter_or_mixed_dtypes_is_refused(
    opened: Callable[[], PreTrainedModel],
) -> None:
    mixed = opened()
    mixed.model.norm.float()
    with pytest.raises(ConfigError, match="several dtypes"):
        mixed.generate(**batch("12"), custom_generate=generate, max_new_tokens=4)
    adapted = opened()
    adapted.model.layers[0].mlp.lora_A = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="merge_and_unload"):
        adapted.generate(**batch("12"), custom_generate=generate, max_new_tokens=4)
