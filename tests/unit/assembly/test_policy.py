"""Which code learns: ours for its families, else transformers', and what is refused by name."""

from pathlib import Path

import pytest

from longtail.assembly.policy import open_policy
from longtail.config.rl import RunConfig, load
from longtail.errors import UnsupportedModelError
from longtail.model.hf.adapters import AdaptedModel
from longtail.model.hf.causal import CausalModel
from longtail.model.hf.model import PolicyTransformer, save_model
from support.causal import random_model
from support.tiny_models import tiny_model


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
