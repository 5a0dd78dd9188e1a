"""Settings of the vLLM plugin: strict, and asked for in one of two ways."""

import re

import pytest

from longtail.config.vllm_plugin import VllmSettings
from longtail.errors import ConfigError
from longtail.vllm.patching import requested, speculation


def test_an_engine_that_does_not_ask_has_no_settings():
    assert requested({}, {}) is None
    assert requested(None, {"LONGTAIL_VLLM": ""}) is None
    assert requested({"gdn_prefill_backend": "x"}, {"LONGTAIL_VLLM": "off"}) is None


def test_either_way_of_asking_gives_the_same_settings():
    assert requested({"longtail": {}}, {}) == VllmSettings()
    assert requested({}, {"LONGTAIL_VLLM": "coupled"}) == VllmSettings()
    assert requested(None, {"LONGTAIL_VLLM": " Learned "}) == VllmSettings(drafter="learned")


def test_additional_config_goes_before_the_variable_unless_that_says_off():
    asked = {"longtail": {"depth": 3}}
    assert requested(asked, {"LONGTAIL_VLLM": "coupled"}) == VllmSettings(depth=3)
    assert requested(asked, {"LONGTAIL_VLLM": "off"}) is None


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (True, "additional_config.longtail = true: it must be a valid dictionary"),
        ({"draft": "coupled"}, "longtail.draft: it is unknown; known are drafter, depth, begin"),
        ({"drafter": "eagle"}, "longtail.drafter = \"eagle\": it must be 'learned'"),
        ({"depth": 17}, "longtail.depth = 17: it must be less than or equal to 16"),
        ({"begin": 1}, "longtail.begin = 1: it must be a valid string"),
    ],
)
def test_an_impossible_setting_is_named(value, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        requested({"longtail": value}, {})


def test_a_mistyped_variable_is_refused():
    with pytest.raises(ConfigError, match="LONGTAIL_VLLM must be learned, coupled or off"):
        requested({}, {"LONGTAIL_VLLM": "on"})


def test_speculation_can_come_from_the_environment():
    assert speculation({}) is None
    text = '{"method": "eagle3", "num_speculative_tokens": 3}'
    found = speculation({"LONGTAIL_VLLM_SPECULATIVE": text})
    assert found == {"method": "eagle3", "num_speculative_tokens": 3}
    for wrong in ("eagle3", "[1]", "{}"):
        with pytest.raises(ConfigError, match="LONGTAIL_VLLM_SPECULATIVE"):
            speculation({"LONGTAIL_VLLM_SPECULATIVE": wrong})
