"""Refusals: TRL's settings by name, and its versions by the signatures of functions."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from longtail.errors import ConfigError
from longtail.integrations.trl import patches
from longtail.integrations.trl.sampling import (
    end_tokens,
    refuse_images,
    refuse_unsupported,
    sampling_params,
)
from longtail.types import SamplingParams
from support.vllm_releases import function


def settings(**changes: Any) -> SimpleNamespace:
    usual = {
        "temperature": 0.8, "top_p": 1.0, "top_k": -1, "min_p": None, "repetition_penalty": 1.0,
        "max_completion_length": 32, "generation_kwargs": None, "structured_outputs_regex": None,
        "mode": "colocate", "tensor_parallel_size": 1,
    }  # fmt: skip
    return SimpleNamespace(**{**usual, **changes})


def test_settings_become_sampling_parameters() -> None:
    extra = {"stop": "</answer>", "stop_token_ids": [9], "top_p": 0.9, "n": 1}
    assert sampling_params(settings(generation_kwargs=extra), (1,)) == SamplingParams(
        temperature=0.8, top_p=0.9, max_tokens=32, stop=("</answer>",), stop_token_ids=(1, 9)
    )


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"repetition_penalty": 1.2}, "repetition_penalty = 1.2"),
        ({"generation_kwargs": {"structured_outputs": {"regex": "a"}}}, "structured_outputs"),
        ({"generation_kwargs": {"seed": 3}}, r"longtail_rollouts\(seed"),
        ({"generation_kwargs": {"best_of": 4}}, "best_of"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        sampling_params(settings(**changes), ())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"structured_outputs_regex": "[0-9]"}, "vllm_structured_outputs_regex"),
        ({"mode": "server"}, "vllm_mode"),
        ({"tensor_parallel_size": 2}, "vllm_tensor_parallel_size"),
    ],
)
def test_modes_of_vllm_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    refuse_unsupported(settings())
    with pytest.raises(ConfigError, match=named):
        refuse_unsupported(settings(**changes))


def test_images_are_refused() -> None:
    refuse_images(None)
    refuse_images([None, None])
    with pytest.raises(ConfigError, match="images"):
        refuse_images([None, ["picture"]])


def test_a_text_ends_at_the_tokens_of_tokenizer_and_generation_config() -> None:
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=[2, 5]))
    assert end_tokens(model, SimpleNamespace(eos_token_id=5)) == (5, 2)


def _functions() -> dict[str, Any]:
    found = {name: _with_parameters(names) for name, names in patches._SIGNATURES.items()}
    return {**found, "VLLMGeneration.__init__": _with_parameters(patches._SETTINGS)}


def _with_parameters(names: Iterable[str]) -> Any:
    return function(" ".join(names), lambda: None)


def test_a_version_with_other_signatures_is_refused_with_the_range_that_works() -> None:
    patches.check("1.16.0", _functions())
    changed = {**_functions(), "VLLMGeneration.generate": _with_parameters(("self", "requests"))}
    with pytest.raises(ConfigError, match=r"trl 9\.0: VLLMGeneration\..*use trl>=") as found:
        patches.check("9.0", changed)
    assert "\n" not in str(found.value)


def test_a_version_without_a_setting_is_refused() -> None:
    fewer = _with_parameters(patches._SETTINGS - {"temperature"})
    with pytest.raises(ConfigError, match="no setting temperature"):
        patches.check("9.0", {**_functions(), "VLLMGeneration.__init__": fewer})
