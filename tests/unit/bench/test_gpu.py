"""`longtail bench gpu`: it runs on a CPU with toy shapes, and its card shows its figures."""

import json
from typing import final

import pytest
import torch
from torch import Tensor

from longtail.assembly.memory import count_parameters
from longtail.bench.gpu import kernels as gpu_kernels
from longtail.bench.gpu import measure as gpu_measure
from longtail.bench.gpu import run as gpu_run
from longtail.bench.gpu import small as gpu_small
from longtail.bench.options import GpuBenchOptions
from longtail.cli.main import main
from longtail.model.kernels.ops import Kernels, TorchKernels
from support import interpreted
from support.fakes import unchecked_shapes

assert interpreted.DEVICE.type in ("cpu", "cuda"), "kernels are interpreted where there is no GPU"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_error_names_the_requirements(capsys):
    assert main(["bench", "gpu"]) == 2
    said = capsys.readouterr()
    assert not said.out
    assert "sees no GPU here" in said.err
    assert "--device cpu --quick" in said.err


@pytest.mark.slow
def test_toy_shapes_run_on_a_cpu(capsys):
    """All parts: kernels are right, drafts change no bit, the last line is JSON."""
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
    assert found["speculation_changes_no_bit"] is True
    assert found["sampling_share"] == pytest.approx(
        found["sampling"]["fused_us"] / 1e3 / found["decode"][1]["step_ms"]
    )


@pytest.mark.slow
def test_a_check_that_fails_is_a_failure(monkeypatch):
    heads = gpu_kernels.Heads(queries=2, keys=1, dim=16)
    monkeypatch.setattr(gpu_kernels, "_TOLERANCES", {torch.float32: 1e-12})
    assert not gpu_kernels.checks(heads, 50, torch.device("cpu"), long=20)["ok"]


def test_a_small_operation_that_is_wrong_or_depends_on_its_batch_is_a_failure():
    @final
    class Shifted(TorchKernels):
        def __init__(self, shift: float) -> None:
            self._shift = shift

        def swiglu(self, gate_up: Tensor) -> Tensor:
            return super().swiglu(gate_up) + self._shift * len(gate_up)

    def check(small: Kernels) -> dict[str, object]:
        return gpu_small.checks(gpu_measure.TOY, torch.device("cpu"), small)

    assert check(TorchKernels())["small_ok"]
    for shift, near in ((1e-7, True), (1e-3, False)):
        found = check(Shifted(shift))
        assert found["small_ok_float32"] == near
        assert not found["small_bits_do_not_depend_on_the_batch"]
        assert not found["small_ok"]


def test_figures_of_other_parts_are_left_out():
    options = GpuBenchOptions(parts=("sampling",))
    found = {
        "device": "X",
        "copy_gb_per_s": 4000.0,
        "sampling": {"rows": 256, "vocab_size": 9, "fused_us": 80.0, "in_memory_us": 800.0},
    }
    assert gpu_run.as_json(options, found)["sampling_share"] is None
    decode = {"batch": 256, "step_ms": 8.0, "bound_ms": 7.0, "step_over_bound": 8 / 7}
    measured = gpu_run.as_json(options, {**found, "decode": [decode]})
    assert measured["sampling_share"] == pytest.approx(0.01)
    assert "graphs" not in measured
    small = {"operation": "swiglu", "tokens": 32, "kernel_us": 3.21, "bandwidth_share": 0.5}
    small |= {"torch_us": 6.0, "compiled_us": 4.0}
    rows = gpu_run.table(options, {**found, "small": [small], "decode": [decode]}).cells()
    assert [row[0] for row in rows] == [
        "copy within the device",
        "sampling, 256 x 9",
        "swiglu, 32",
        "decode step, 256",
    ]
    assert rows[2][1:] == ["3.2 us, 50% of the copy's bandwidth", "PyTorch 6.0 us, compiled 4.0 us"]


def test_the_shape_is_qwens():
    assert count_parameters(gpu_measure.QWEN_7B) == 7_615_616_512, "as its model card has it"
