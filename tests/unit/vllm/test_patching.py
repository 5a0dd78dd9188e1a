"""A function of vLLM is replaced only where its parameters are known, and features are refused."""

import re
from types import SimpleNamespace

import pytest

from longtail.config.vllm_plugin import VllmSettings
from longtail.errors import ConfigError
from longtail.vllm import coupled_v2, patching
from longtail.vllm.patching import (
    admit,
    admit_learned,
    check,
    check_room,
    module_of,
    requested,
    speculation,
)
from support.vllm_releases import PARAMETERS, function, module, release


def config(**speculative):
    return SimpleNamespace(speculative_config=SimpleNamespace(**speculative))


def test_known_parameters_pass_and_others_are_refused_by_name():
    for parameters in ("a b", "a b d"):
        there = module("there", f=function(parameters, lambda: 1))
        assert check(there, "f", "a b", then="d") is there.f
    with pytest.raises(ConfigError, match=r"f in there takes b, a; known is a, b; use vLLM"):
        check(module("there", f=function("b a", lambda: 1)), "f", "a b", then="d")
    with pytest.raises(ConfigError, match="f in there has a new parameter e"):
        check(module("there", f=function("a b e", lambda: 1)), "f", "a b", then="d")
    with pytest.raises(ConfigError, match="this vLLM has no f in there"):
        check(module("there"), "f", "a b")


def test_a_missing_module_is_named_and_another_missing_package_is_not_hidden(monkeypatch):
    with pytest.raises(ConfigError, match=r"this vLLM has no module no_such_package\.module"):
        module_of("no_such_package.module")
    release(monkeypatch)
    assert module_of("vllm.v1.worker.gpu.sample.gumbel").gumbel_sample


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (config(rejection_sample_method="block"), "rejection_sample_method='block'"),
        (config(use_local_argmax_reduction=True), "use_local_argmax_reduction"),
        (SimpleNamespace(watermark_config=object()), "watermark_config"),
        (SimpleNamespace(model_config=SimpleNamespace(is_diffusion=True)), "diffusion"),
    ],
)
def test_a_feature_that_cannot_be_coupled_is_refused(given, said):
    with pytest.raises(ConfigError, match=said):
        admit(given)


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("rejection_sampler", "rejection_sample"),
        ("gumbel", "gumbel_sample"),
        ("topk_topp_triton", "apply_top_k_top_p_triton"),
        ("states", "apply_top_k_top_p"),
    ],
)
def test_a_release_with_a_new_feature_is_refused(monkeypatch, place, name):
    modules = release(monkeypatch)
    newer = function(PARAMETERS[name] + " novelty", lambda: 1)
    monkeypatch.setattr(modules[place], name, newer)
    with pytest.raises(ConfigError, match=f"{name} .* has a new parameter novelty"):
        coupled_v2.patches()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"runner_type": "pooling"}, "does not generate"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size = 2: the last stage has no"),
        ({"lora_config": SimpleNamespace(max_loras=2)}, "max_loras = 2"),
        ({"is_hybrid": True}, "linear attention"),
        ({"quant_config": SimpleNamespace(lm_head_quantized=True)}, "lm_head of this model is q"),
    ],
)
def test_where_no_drafter_can_be_learned_the_field_is_named(changes, said):
    def asked(runner_type="generate", pipeline_parallel_size=1, is_hybrid=False, **config):
        return SimpleNamespace(
            model_config=SimpleNamespace(runner_type=runner_type, is_hybrid=is_hybrid),
            device_config=SimpleNamespace(device_type="cpu"),
            parallel_config=SimpleNamespace(pipeline_parallel_size=pipeline_parallel_size),
            **config,
        )

    admit_learned(asked())
    with pytest.raises(ConfigError, match=said):
        admit_learned(asked(**changes))


def test_a_gpu_without_room_for_the_sums_is_refused_before_the_model_is_loaded(monkeypatch):
    """Sums of depth 4 take 1.3 GB at hidden size 4,096, beside vLLM's share of 16 GB."""
    platform = SimpleNamespace(get_device_total_memory=lambda: 16 * 10**9)
    monkeypatch.setattr(patching, "module_of", lambda _: SimpleNamespace(current_platform=platform))

    def asked(device="cuda", share=0.95, **cache):
        return SimpleNamespace(
            cache_config=SimpleNamespace(gpu_memory_utilization=share, **cache),
            device_config=SimpleNamespace(device_type=device),
            model_config=SimpleNamespace(get_hidden_size=lambda: 4096),
            speculative_config=SimpleNamespace(num_speculative_tokens=4),
        )

    for admitted in (asked(share=0.9), asked(kv_cache_memory_bytes=10**9), asked("cpu")):
        check_room(admitted)
    with pytest.raises(ConfigError, match=r"0\.95 leaves 0\.8 GB .* sums take 1\.3 GB; lower it"):
        check_room(asked())


# ---- settings: strict, and asked for in one of two ways


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
