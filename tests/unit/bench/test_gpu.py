"""`longtail bench gpu`: that it tries itself on a CPU, says what it needs, and arranges figures."""

import argparse
import json
from typing import final

import pytest
import torch
from torch import Tensor

from longtail.bench.common.grown import _places
from longtail.bench.e2e import options as e2e_setting
from longtail.bench.e2e.arms import ArmResult
from longtail.bench.gpu import card as gpu_card
from longtail.bench.gpu import kernels as gpu_kernels
from longtail.bench.gpu import parts as gpu_parts
from longtail.bench.gpu import small as gpu_small
from longtail.bench.gpu import training as gpu_training
from longtail.bench.gpu.options import PARTS, Setting, add_arguments, read_setting
from longtail.bench.gpu.speculation import grown_shape
from longtail.build.memory import count_parameters
from longtail.cli.main import main
from longtail.config import rl as config
from longtail.errors import ConfigError
from longtail.model.kernels.ops import Kernels, TorchKernels
from longtail.tiny import model_config
from support import interpreted
from support.fakes import unchecked_shapes

assert interpreted.DEVICE.type in ("cpu", "cuda"), "kernels are interpreted where there is no GPU"


def parse(*words: str) -> Setting:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return read_setting(parser.parse_args(words))


def test_everything_is_measured_on_a_gpu_unless_said_otherwise():
    expected = Setting(parts=PARTS, device="cuda", quick=False, repeats=10)
    assert parse() == expected
    quick = parse("--parts", "steps,checks", "--device", "cpu", "--quick")
    assert quick == Setting(parts=("steps", "checks"), device="cpu", quick=True, repeats=2)
    assert set(PARTS) - set(parse("--quick").parts) == {"training"}, "it wants a taught model"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--parts", "steps,walks"), "--parts: 'walks' is not one of checks, attention"),
        (("--repeats", "0"), "--repeats = 0: it must be from 1"),
        (("--device", "cpu"), "--device cpu: .* add --quick"),
        (("--device", "tpu"), "--device = 'tpu': it must be cuda"),
    ],
)
def test_an_option_that_is_wrong_is_named_with_its_remedy(words, message):
    with pytest.raises(ConfigError, match=message):
        parse(*words)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_it_would_need(capsys):
    assert main(["bench", "gpu"]) == 2
    said = capsys.readouterr()
    assert not said.out
    assert "sees no GPU here" in said.err
    assert "--device cpu --quick" in said.err


@pytest.mark.slow
def test_the_bench_tries_itself_on_a_cpu(capsys):
    """But for training: kernels are right, texts are the same, the last line is JSON."""
    with unchecked_shapes():
        assert main(["bench", "gpu", "--device", "cpu", "--quick", "--repeats", "1"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["checks"]["ok"] is True
    assert [(cell["operation"], cell["tokens"]) for cell in found["small"]] == [
        (name, tokens)
        for tokens in (1, 3)
        for name in ("add_norm", "rotate", "swiglu", "store_rows")
    ]
    assert {cell["batch"] for cell in found["decode"]} == {1, 3}
    assert found["graphs"] is None, "no graphs on a CPU"
    for cell in found["speculation"]:
        assert cell["differing_share"] == 0.0
        assert cell["accept_length"] >= 1.0
    assert found["sampling_share"] == pytest.approx(
        found["sampling"]["fused_us"] / 1e3 / found["decode"][1]["step_ms"]
    )


@pytest.mark.slow
def test_a_check_that_fails_is_a_failure():
    checks = gpu_parts.kernels.checks
    heads = gpu_parts.Heads(queries=2, keys=1, dim=16)
    sound = checks(heads, 50, torch.device("cpu"), long=20)
    assert sound["ok"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_parts.kernels, "_TOLERANCES", {torch.float32: 1e-12})
        assert not checks(heads, 50, torch.device("cpu"), long=20)["ok"]


def test_a_small_operation_that_is_wrong_or_sees_its_neighbours_is_a_failure(monkeypatch):
    @final
    class Shifted(TorchKernels):
        def __init__(self, shift: float) -> None:
            self._shift = shift

        def swiglu(self, gate_up: Tensor) -> Tensor:
            return super().swiglu(gate_up) + self._shift * len(gate_up)

    def check(small: Kernels) -> dict[str, object]:
        here = gpu_kernels.kernels_here()._replace(small=small)
        monkeypatch.setattr(gpu_small, "kernels_here", lambda: here)
        return gpu_small.checks(gpu_parts.TOY, torch.device("cpu"))

    assert check(TorchKernels())["small_ok"]
    for shift, near in ((1e-7, True), (1e-3, False)):
        found = check(Shifted(shift))
        assert found["small_ok_float32"] == near
        assert not found["small_bits_do_not_depend_on_the_batch"]
        assert not found["small_ok"]


def test_figures_that_were_not_measured_are_not_there():
    setting = parse("--parts", "sampling")
    found = {
        "device": "X",
        "copy_gb_per_s": 4000.0,
        "sampling": {"rows": 256, "vocab_size": 9, "fused_us": 80.0, "in_memory_us": 800.0},
    }
    assert gpu_card.as_json(setting, found)["sampling_share"] is None
    decode = {"batch": 256, "step_ms": 8.0, "bound_ms": 7.0, "step_over_bound": 8 / 7}
    measured = gpu_card.as_json(setting, {**found, "decode": [decode]})
    assert measured["sampling_share"] == pytest.approx(0.01)
    assert "graphs" not in measured
    small = {"operation": "swiglu", "tokens": 32, "kernel_us": 3.21, "bandwidth_share": 0.5}
    small |= {"torch_us": 6.0, "compiled_us": 4.0}
    rows = gpu_card.rows({**found, "small": [small], "decode": [decode]})
    assert [row[0] for row in rows] == [
        "copy within the device",
        "sampling, 256 x 9",
        "swiglu, 32",
        "decode step, 256",
    ]
    assert rows[2][1:] == ["3.2 us, 50% of the copy's bandwidth", "PyTorch 6.0 us, compiled 4.0 us"]


def test_the_shape_is_qwens_and_the_tiny_reasoner_can_grow_into_it():
    assert count_parameters(gpu_parts.QWEN_7B) == 7_615_616_512, "as its model card has it"
    _places(model_config(), grown_shape(model_config(), gpu_parts.QWEN_7B))  # refuses what cannot


def test_training_runs_one_worker_on_the_device_and_tells_its_ratios(monkeypatch):
    asked: list[e2e_setting.Setting] = []

    def measured(setting: e2e_setting.Setting, *_: object) -> dict[str, ArmResult]:
        asked.append(setting)
        seconds = {"off": 6.0, "history": 5.0, "frozen": 3.0, "serial": 4.0}
        return {
            name: ArmResult(
                metrics=[{"timing_s/step": took, "timing_s/rollout": took / 2, "reward/mean": 0.5}],
                texts={"a": "1"},
            )
            for name, took in seconds.items()
        }

    monkeypatch.setattr(gpu_training, "measure", measured)
    found = gpu_training.training("cuda:1", print, quick=False)
    (setting,) = asked
    assert (setting.workers, setting.model, setting.arms[0]) == (1, "100m", "off")
    assert config.load(None, setting.words).run.device == "cuda:1"
    assert found["step_speedup"]["frozen"]["median"] == 2.0
    assert (found["rewards_agree"], found["differing_share"]["serial"]) == (True, 0.0)
    lines = gpu_card.rows({"copy_gb_per_s": 1.0, "training": found})
    assert ["training step, serial", "1.50x of off"] in [line[:2] for line in lines]
