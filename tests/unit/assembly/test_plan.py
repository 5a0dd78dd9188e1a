"""What generates, what learns, on how many GPUs; what is refused by name before a run starts."""

from importlib import metadata, util
from pathlib import Path
from typing import Any

import pytest
import torch

from longtail import Engine
from longtail.assembly import plan
from longtail.assembly.plan import RunPlan, plan_run
from longtail.assembly.precision import run_device
from longtail.config.files import resolve
from longtail.config.rl import load
from longtail.config.sft import SftConfig
from longtail.errors import ConfigError, UnsupportedModelError
from longtail.model.hf.adapters import AdaptedModel
from longtail.model.hf.causal import CausalModel
from longtail.model.hf.model import PolicyTransformer, save_model
from longtail.rl.policy import open_policy
from longtail.system import machine
from longtail.system.device import own_engine_device
from support.causal import random_model
from support.tiny_models import tiny_config, tiny_model

VLLM = "--rollout.engine=vllm"
SHARDS = ("--learner.sharding=full", "--cluster.workers=2")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a model of a family that our decoder has, and one that it lacks."""
    root = tmp_path_factory.mktemp("models")
    save_model(tiny_model("llama"), root / "llama")
    random_model("mixtral").save_pretrained(root / "mixtral")
    return root


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    found: Any = object()
    monkeypatch.setattr(util, "find_spec", lambda name: found)
    monkeypatch.setattr(metadata, "version", lambda name: "0.32.0")


def planned(directory: Path, *words: str) -> RunPlan:
    return plan_run(load(None, ["--run.dir=run", "--run.device=cpu", *words]), directory)


@pytest.mark.usefixtures("installed")
def test_vllm_generates_for_families_that_our_engine_lacks(models: Path) -> None:
    own, foreign = models / "llama", models / "mixtral"
    assert planned(own).shape == tiny_config("llama")
    assert not planned(own).on_vllm
    assert not planned(own, "--rollout.engine=own").on_vllm
    assert planned(own, VLLM).on_vllm
    assert planned(foreign).on_vllm
    assert planned(foreign).shape.max_positions == 128
    with pytest.raises(ConfigError, match=r"rollout\.engine = 'own': .*Mixtral.*set it to 'vllm'"):
        planned(foreign, "--rollout.engine=own")


def test_without_vllm_one_sentence_says_what_to_install(models: Path, monkeypatch) -> None:
    monkeypatch.setattr(util, "find_spec", lambda name: None)
    for family, words in (("mixtral", ()), ("llama", (VLLM,))):
        with pytest.raises(ConfigError, match="pip install vllm"):
            planned(models / family, *words)


@pytest.mark.usefixtures("installed")
def test_another_release_of_vllm_is_refused(models: Path, monkeypatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "0.40.1")
    with pytest.raises(ConfigError, match=r"vLLM 0\.40\.1 is installed, and 0\.31 to 0\.33"):
        planned(models / "llama", VLLM)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("words", "field"),
    [
        (("--rollout.min_p=0.1",), "rollout.min_p = 0.1"),
        (("--speculation.coupled=false",), "speculation.coupled = false"),
        (("--speculation.tuner=fixed", "--speculation.width=2"), "speculation.width = 2"),
    ],
)
def test_what_vllm_cannot_do_is_refused_by_name(models: Path, words, field) -> None:
    with pytest.raises(ConfigError, match=field):
        planned(models / "llama", VLLM, *words)


def test_shards_of_transformers_code_are_refused_by_name(models: Path) -> None:
    planned(models / "llama", *SHARDS)
    with pytest.raises(ConfigError, match=r"learner.sharding = 'full': transformers' code"):
        planned(models / "llama", *SHARDS, "--learner.model=transformers")


def test_without_peft_the_command_that_installs_it_is_named(models: Path, monkeypatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(machine.importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=r"learner.lora needs peft .*pip install .*lora"):
        planned(models / "llama", "--learner.lora.rank=2")


@pytest.mark.usefixtures("installed")
def test_shards_are_on_gpus_of_their_own(models: Path, monkeypatch) -> None:
    monkeypatch.setattr(plan, "run_device", lambda config: torch.device("cuda"))
    assert planned(models / "llama", *SHARDS).on_vllm
    with pytest.raises(ConfigError, match=r"learner.sharding = 'full': workers share a GPU"):
        planned(models / "llama", *SHARDS, "--cluster.gpus_per_worker=0.5")


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("words", "gpus"),
    [
        ((), 1.0),
        (("--rollout.vllm={tensor_parallel_size = 2}",), 2.0),
        (("--cluster.gpus_per_worker=0.5",), 0.5),
        (("--cluster.gpus_per_worker=1.5",), None),
        (("--cluster.gpus_per_worker=0.5", "--rollout.vllm={tensor_parallel_size = 2}"), None),
    ],
)
def test_workers_have_whole_gpus_or_share_one(models: Path, monkeypatch, words, gpus) -> None:
    monkeypatch.setattr(plan, "run_device", lambda config: torch.device("cuda"))
    if gpus is None:
        with pytest.raises(ConfigError, match=r"^cluster\.gpus_per_worker"):
            planned(models / "llama", *words)
    else:
        assert planned(models / "llama", *words).gpus == gpus


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
    assert (
        type(open_policy(models / family, load(None, ["--run.device=cpu", *words]), "cpu")) is kind
    )


def test_our_decoder_refuses_a_family_that_it_lacks(models):
    with pytest.raises(UnsupportedModelError, match="MixtralForCausalLM"):
        open_policy(
            models / "mixtral", load(None, ["--run.device=cpu", "--learner.model=own"]), "cpu"
        )


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("name", ["auto", "cpu"])
def test_the_own_engine_is_on_the_cpu_even_beside_a_gpu(name: str, tmp_path: Path) -> None:
    words = [f"--run.dir={tmp_path}", f"--run.device={name}", "--rollout.engine=own"]
    assert run_device(load(None, words)) == own_engine_device(name, "device") == torch.device("cpu")


@pytest.mark.usefixtures("gpu")
def test_a_gpu_is_refused_by_the_setting_that_names_it(tmp_path: Path) -> None:
    words = [f"--run.dir={tmp_path}", "--run.device=cuda:1", "--rollout.engine=own"]
    with pytest.raises(ConfigError, match=r"^run\.device = 'cuda:1': .*vLLM.*docs/vllm\.md"):
        run_device(load(None, words))
    with pytest.raises(ConfigError, match=r"^device = 'cuda': .*vLLM"):
        Engine("smollm2", device="cuda")


@pytest.mark.usefixtures("gpu")
def test_learning_and_vllm_use_the_gpu(tmp_path: Path) -> None:
    words = [f"--run.dir={tmp_path}", "--run.device=auto"]
    assert run_device(load(None, [*words, "--rollout.engine=vllm"])).type == "cuda"
    assert run_device(resolve(SftConfig, None, words)).type == "cuda"
