"""Which code learns: ours for its families, else transformers', and what is refused by name."""

from pathlib import Path

import pytest

from longtail.assembly.policy import check_policy, open_policy, shape_of
from longtail.config.rl import RunConfig, load
from longtail.errors import ConfigError, UnsupportedModelError
from longtail.model.hf.adapters import AdaptedModel
from longtail.model.hf.causal import CausalModel
from longtail.model.hf.model import PolicyTransformer, save_model
from longtail.system import machine
from support.causal import random_model
from support.tiny_models import tiny_config, tiny_model


def config(*words: str) -> RunConfig:
    return load(None, ["--run.device=cpu", *words])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    save_model(tiny_model("llama"), root / "llama")
    random_model("mixtral").save_pretrained(root / "mixtral")
    return root


@pytest.mark.parametrize(
    ("family", "words", "kind"),
    [
        ("llama", (), PolicyTransformer),
        ("llama", ("--learner.model=own",), PolicyTransformer),
        ("llama", ("--learner.model=transformers",), CausalModel),
        ("llama", ("--learner.lora.rank=2",), AdaptedModel),
        ("mixtral", (), CausalModel),
        ("mixtral", ("--learner.lora.rank=2",), AdaptedModel),
    ],
)
def test_the_code_that_learns_follows_from_family_and_configuration(models, family, words, kind):
    assert type(open_policy(models / family, config(*words), "cpu")) is kind


def test_our_decoder_refuses_a_family_that_it_lacks(models):
    with pytest.raises(UnsupportedModelError, match="MixtralForCausalLM"):
        open_policy(models / "mixtral", config("--learner.model=own"), "cpu")


def test_a_shape_is_known_of_every_family(models):
    assert shape_of(models / "llama") == tiny_config("llama")
    assert shape_of(models / "mixtral").max_positions == 128


def test_shards_of_transformers_code_are_refused_by_name(models):
    words = ("--learner.sharding=full", "--cluster.workers=2")
    check_policy(models / "llama", config(*words))
    for family, more in (("mixtral", ()), ("llama", ("--learner.model=transformers",))):
        with pytest.raises(ConfigError, match=r"learner.sharding = 'full': transformers' code"):
            check_policy(models / family, config(*words, *more))


def test_without_peft_the_command_that_installs_it_is_named(models, monkeypatch):
    def missing(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(machine.importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=r"learner.lora needs peft .*pip install .*lora"):
        check_policy(models / "llama", config("--learner.lora.rank=2"))
    check_policy(models / "llama", config())
