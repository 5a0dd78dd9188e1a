"""longtail's own engine generates on CPUs: a GPU is refused in a sentence that names vLLM."""

from pathlib import Path

import pytest
import torch

from longtail import Engine
from longtail.assembly.device import own_engine_device, run_device
from longtail.config.files import resolve
from longtail.config.rl import load
from longtail.config.sft import SftConfig
from longtail.errors import ConfigError

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.mark.parametrize("name", ["auto", "cpu"])
def test_the_own_engine_is_on_the_cpu_even_beside_a_gpu(name: str, tmp_path: Path) -> None:
    words = [f"--run.dir={tmp_path}", f"--run.device={name}", "--rollout.engine=own"]
    assert run_device(load(None, words)) == own_engine_device(name, "device") == CPU


def test_a_gpu_is_refused_by_the_setting_that_names_it(tmp_path: Path) -> None:
    words = [f"--run.dir={tmp_path}", "--run.device=cuda:1", "--rollout.engine=own"]
    with pytest.raises(ConfigError, match=r"^run\.device = 'cuda:1': .*vLLM.*docs/vllm\.md"):
        run_device(load(None, words))
    with pytest.raises(ConfigError, match=r"^device = 'cuda': .*vLLM"):
        Engine("smollm2", device="cuda")


def test_learning_and_vllm_use_the_gpu(tmp_path: Path) -> None:
    words = [f"--run.dir={tmp_path}", "--run.device=auto"]
    assert run_device(load(None, [*words, "--rollout.engine=vllm"])).type == "cuda"
    assert run_device(resolve(SftConfig, None, words)).type == "cuda"
