"""`custom_generate` of transformers: its records, criteria, and the options that are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import StoppingCriteriaList, StopStringCriteria

from longtail.errors import ConfigError, RequestError
from longtail.integrations.transformers import generate
from support.hf_models import PAD, batch, opened, sampled
from support.tiny_models import tiny_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    return opened(tmp_path_factory.mktemp("models"))


def test_without_a_seed_torchs_generator_decides(model: PreTrainedModel) -> None:
    with torch.random.fork_rng():
        drawn = []
        for state in (5, 5, 6):
            torch.default_generator.manual_seed(state)
            drawn.append(sampled(model, "3+4=", seed=None))
    assert drawn[0] == drawn[1] != drawn[2]


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
    expected = model.generate(**batch("3+4=", "12"), **options)
    options |= dict(custom_generate=generate, drafter="none")
    found = model.generate(**batch("3+4=", "12"), **options)
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
    options = dict(custom_generate=generate, max_new_tokens=4, pad_token_id=PAD, drafter="none")
    for mask in (inputs["attention_mask"].flip(1), inputs["attention_mask"] * 0):
        with pytest.raises(ConfigError, match="pad on the left"):
            model.generate(inputs["input_ids"], attention_mask=mask, **options)
    with pytest.raises(RequestError, match="the model has 508 of its 512 positions left"):
        model.generate(**inputs, **options | {"max_new_tokens": 509})
    assert model.generate(**inputs, **options).shape == (2, 8)


def test_a_model_with_an_adapter_or_mixed_dtypes_is_refused(tmp_path: Path) -> None:
    mixed = opened(tmp_path)
    mixed.model.norm.float()
    with pytest.raises(ConfigError, match="several dtypes"):
        mixed.generate(**batch("12"), custom_generate=generate, max_new_tokens=4)
    adapted = opened(tmp_path)
    adapted.model.layers[0].mlp.lora_A = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="merge_and_unload"):
        adapted.generate(**batch("12"), custom_generate=generate, max_new_tokens=4)
