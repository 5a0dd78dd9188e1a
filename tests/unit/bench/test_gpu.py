"""`longtail bench gpu`: it runs on a CPU with toy shapes, and its card shows its figures."""

import json

import pytest
import torch

from longtail.bench.gpu import kernels as gpu_kernels
from longtail.cli.main import main
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
