"""A function of vLLM is replaced only where its parameters are known, and features are refused."""

from types import SimpleNamespace

import pytest

from longtail.errors import ConfigError
from longtail.integrations.vllm import v2
from longtail.integrations.vllm.guards import (
    Patch,
    Signature,
    VllmSettings,
    check,
    module_of,
    problems,
    refuse,
    replace,
    without_draft_cache,
)
from support.vllm_releases import PARAMETERS, function, module, release


def config(**speculative):
    return SimpleNamespace(speculative_config=SimpleNamespace(**speculative))


def test_known_parameters_pass_and_others_are_refused_by_name():
    known = Signature(first=("a", "b"), then=("d",))
    for parameters in ("a b", "a b d"):
        there = module("there", f=function(parameters, lambda: 1))
        assert check(there, "f", known) is there.f
    with pytest.raises(ConfigError, match=r"f in there takes b, a; known is a, b; use vLLM"):
        check(module("there", f=function("b a", lambda: 1)), "f", known)
    with pytest.raises(ConfigError, match="f in there has a new parameter e"):
        check(module("there", f=function("a b e", lambda: 1)), "f", known)
    with pytest.raises(ConfigError, match="this vLLM has no f in there"):
        check(module("there"), "f", known)


def test_a_missing_module_is_named_and_another_missing_package_is_not_hidden(monkeypatch):
    with pytest.raises(ConfigError, match=r"this vLLM has no module no_such_package\.module"):
        module_of("no_such_package.module")
    release(monkeypatch, "0.32")
    assert module_of("vllm.v1.worker.gpu.sample.gumbel").gumbel_sample


def test_all_functions_are_put_back():
    class Base:
        def f(self):
            return "base"

    class Derived(Base):
        pass

    there = module("there", f=1)
    restore = replace(
        [
            Patch(owner=there, name="f", replacement=lambda: 2),
            Patch(owner=Derived, name="f", replacement=lambda self: "new"),
        ]
    )
    assert (there.f(), Derived().f(), Base().f()) == (2, "new", "base")
    restore()
    assert there.f == 1
    assert Derived().f() == "base"
    assert "f" not in vars(Derived)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rejection_sample_method": "block"}, "rejection_sample_method='block'"),
        ({"rejection_sample_method": "synthetic"}, "rejection_sample_method='synthetic'"),
        ({"rejection_sample_method": "fly"}, "rejection_sample_method='fly'"),
        ({"use_local_argmax_reduction": True}, "use_local_argmax_reduction"),
    ],
)
def test_a_feature_with_another_rule_of_acceptance_is_refused(given, said):
    with pytest.raises(ConfigError, match=said):
        refuse(config(**given))


def test_watermarks_and_diffusion_are_refused():
    assert "watermark_config" in problems(SimpleNamespace(watermark_config=object()))[0]
    model = SimpleNamespace(is_diffusion=True)
    assert "diffusion" in problems(SimpleNamespace(model_config=model))[0]


def test_an_ordinary_engine_is_not_refused():
    refuse(SimpleNamespace())
    refuse(config(rejection_sample_method="standard", use_local_argmax_reduction=False))


def test_no_cache_of_draft_logits_is_asked_for():
    asked = config(draft_sample_method="probabilistic")
    without_draft_cache(asked)
    assert asked.speculative_config.draft_sample_method == "greedy"
    without_draft_cache(SimpleNamespace(speculative_config=None))


@pytest.mark.parametrize("version", PARAMETERS)
def test_each_known_release_is_accepted(monkeypatch, version):
    release(monkeypatch, version)
    coupled = {str(patch) for patch in v2.patches(VllmSettings(), None)}
    matched = {str(patch) for patch in v2.patches(VllmSettings(drafts="match"), None)}
    assert "rejection_sampler.rejection_sample" in matched
    assert [name.rsplit(".", 1)[1] for name in coupled - matched] == ["sample_draft"]


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
    modules = release(monkeypatch, "0.33")
    newer = function(PARAMETERS["0.33"][name] + " novelty", lambda: 1)
    monkeypatch.setattr(modules[place], name, newer)
    with pytest.raises(ConfigError, match=f"{name} .* has a new parameter novelty"):
        v2.patches(VllmSettings(), None)
