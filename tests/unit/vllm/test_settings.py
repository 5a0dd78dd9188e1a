"""Settings of the vLLM plugin: strict, and asked for in one of two ways."""

import pytest

from longtail.errors import ConfigError
from longtail.vllm.guards import VllmSettings, parse_settings, requested, speculation


def test_an_engine_that_does_not_ask_has_no_settings():
    assert requested({}, {}) is None
    assert requested(None, {"LONGTAIL_VLLM": ""}) is None
    assert requested({"gdn_prefill_backend": "x"}, {"LONGTAIL_VLLM": "off"}) is None


def test_either_way_of_asking_gives_the_same_settings():
    assert requested({"longtail": {}}, {}) == VllmSettings()
    assert requested({}, {"LONGTAIL_VLLM": "coupled"}) == VllmSettings()
    assert requested({}, {"LONGTAIL_VLLM": "learned"}) == VllmSettings(drafter="learned")
    assert requested(None, {"LONGTAIL_VLLM": " Match "}) == VllmSettings(drafts="match")


def test_additional_config_goes_before_the_variable_unless_that_says_off():
    asked = {"longtail": {"drafts": "match"}}
    assert requested(asked, {"LONGTAIL_VLLM": "coupled"}) == VllmSettings(drafts="match")
    assert requested(asked, {"LONGTAIL_VLLM": "off"}) is None


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (True, "additional_config.longtail must be a table of settings, not True"),
        ({"draft": "coupled"}, "additional_config.longtail.draft is unknown"),
        ({"drafts": "greedy"}, "longtail.drafts must be coupled or match, not 'greedy'"),
        ({"block_rows": 0}, "longtail.block_rows must be an integer from 1 to 4096, not 0"),
        ({"block_rows": True}, "longtail.block_rows must be an integer"),
        ({"drafter": "eagle"}, "longtail.drafter must be learned, not 'eagle'"),
        ({"depth": 17}, "longtail.depth must be an integer from 1 to 16, not 17"),
        ({"history": 1}, "longtail.history must be true or false, not 1"),
        ({"begin": 1}, "longtail.begin must be the directory of a drafter, not 1"),
    ],
)
def test_an_impossible_setting_is_named(value, said):
    with pytest.raises(ConfigError, match=said.replace(".", r"\.")):
        parse_settings(value)


def test_a_mistyped_variable_is_refused():
    with pytest.raises(ConfigError, match="LONGTAIL_VLLM must be learned, coupled, match or off"):
        requested({}, {"LONGTAIL_VLLM": "on"})


def test_speculation_can_come_from_the_environment():
    assert speculation({}) is None
    text = '{"method": "eagle3", "num_speculative_tokens": 3}'
    found = speculation({"LONGTAIL_VLLM_SPECULATIVE": text})
    assert found == {"method": "eagle3", "num_speculative_tokens": 3}
    for wrong in ("eagle3", "[1]", "{}"):
        with pytest.raises(ConfigError, match="LONGTAIL_VLLM_SPECULATIVE"):
            speculation({"LONGTAIL_VLLM_SPECULATIVE": wrong})
