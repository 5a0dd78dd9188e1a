import json
import os
import sys
from argparse import Namespace
from importlib import metadata
from pathlib import Path

import pytest
import torch

from longtail.assembly import precision
from longtail.cli import doctor
from longtail.cli import main as cli
from longtail.model.kernels import native
from longtail.system import device, machine
from longtail.tuner.cost import CostModel, DraftCost, TimeCurve
from longtail.tuner.cost_file import save_costs


def test_a_healthy_machine_gets_a_table_and_exit_code_0(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert doctor.run(Namespace(json=False, run=None)) == 0
    out = capsys.readouterr().out
    for word in ("python", "torch", "cores", "memory", "extra", "self check", "ready"):
        assert word in out


def test_json_holds_the_same_findings(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.run(Namespace(json=True, run=None)) == 0
    report = json.loads(capsys.readouterr().out)
    names = {finding["name"] for finding in report["findings"]}
    assert report["ok"] is True
    assert {"python", "torch", "generation", "matrix product", "data", "wandb"} <= names
    assert all(finding["value"] for finding in report["findings"])


def test_it_says_in_which_dtypes_a_text_does_not_depend_on_its_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def batch_invariant() -> str:
        return {finding.name: finding.value for finding in doctor.examine()}["batch-invariant"]

    monkeypatch.setattr(native, "layout", {torch.float32: "inputs"}.get)
    assert batch_invariant() == "float32"
    monkeypatch.setattr(native, "layout", lambda dtype: None)
    assert batch_invariant() == "no dtype: texts may differ at near-ties"


@pytest.mark.parametrize(
    ("layout", "multiplies", "auto", "rollouts", "training"),
    [
        ("pairs", True, "rollout.dtype = bfloat16, autocast = true", "fast", "in hardware"),
        ("halves", False, "rollout.dtype = bfloat16, autocast = false", "fast", "emulated"),
        (None, False, "rollout.dtype = float32, autocast = false", "emulated", "emulated"),
    ],
)
def test_it_says_what_auto_is_and_where_bfloat16_is_fast(
    layout: str | None, multiplies: bool, auto: str, rollouts: str, training: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(native, "layout", lambda dtype: layout)
    for module in (device, precision):
        monkeypatch.setattr(module, "multiplies_bfloat16", lambda device: multiplies)
    found = {finding.name: finding.value for finding in doctor.examine()}
    assert found["auto on the CPU"] == auto
    assert found["bfloat16 rollouts on the CPU"].startswith(rollouts)
    assert found["bfloat16 training on the CPU"].startswith(training)


def test_an_absent_extra_comes_with_the_command_and_is_no_failure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    version = metadata.version

    def without_math_verify(name: str) -> str:
        if name == "math-verify":
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(metadata, "version", without_math_verify)
    assert doctor.run(Namespace(json=False, run=None)) == 0
    assert f"{sys.executable} -m pip install" in capsys.readouterr().out
    found = {finding.name: finding for finding in doctor.examine()}
    assert found["math"].level == "optional"
    assert found["math"].remedy.endswith("[math]'")
    assert found["tensorboard"].remedy == ""


def test_a_torch_that_is_too_old_fails_with_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    version = metadata.version
    monkeypatch.setattr(metadata, "version", lambda n: "2.9.1+cpu" if n == "torch" else version(n))
    assert doctor.run(Namespace(json=False, run=None)) == 1
    out = capsys.readouterr().out
    assert "MISSING" in out
    assert "2.9.1+cpu, at least 2.10" in out
    assert "pip install -U torch" in out


def test_an_absent_package_is_missing() -> None:
    found = doctor.required("no-such-package-at-all")
    assert found.level == "missing"
    assert found.remedy.endswith("pip install no-such-package-at-all")


def test_a_self_check_that_fails_is_a_finding() -> None:
    def broken() -> str:
        raise ArithmeticError("2 + 2 = 5")

    found = doctor.attempt("sums", broken)
    assert found.level == "missing"
    assert found.value == "ArithmeticError: 2 + 2 = 5"


def test_the_machine_has_memory_cores_and_a_name() -> None:
    memory = machine.memory()
    assert machine.usable_cores() >= 1
    assert machine.cpu_name()
    assert memory.total is not None
    assert memory.total > 2**28
    assert memory.available is None or 0 < memory.available <= memory.total


def _save_costs(run: Path) -> Path:
    run.mkdir(parents=True)
    costs = CostModel(TimeCurve((1, 64), (0.001, 0.01)), pair_s=1e-6, node_pair_s=1e-7)
    costs.drafts = [DraftCost(start_s=1e-3, request_s=0.0, level_s=1e-3, row_s=1e-4)] * 2
    save_costs(run / "cost.json", costs)
    return run


def test_the_cost_model_of_a_run_is_told_step_by_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = _save_costs(tmp_path / "run")
    assert cli.main(["doctor", "--json", "--run", str(run)]) == 0
    report = json.loads(capsys.readouterr().out)
    found = {f["name"]: f for f in report["findings"] if f["part"] == "cost model"}
    assert found["run"]["value"] == str(run)
    assert found["plain step, by tokens"]["value"].startswith("1: 1.00 ms, 8: ")
    assert found["verify step, by tokens"]["value"].endswith("64: 10.00 ms")
    assert found["drafter 2"]["value"].startswith("a pass 1.000 ms")
    assert all(each["level"] == "ok" for each in found.values())


def test_the_run_that_measured_last_is_shown_unless_another_is_named(tmp_path: Path) -> None:
    assert doctor.newest_run(tmp_path / "runs") is None
    assert list(doctor.cost_model(None)) == []
    for age, name in enumerate(("new", "old", "older")):
        run = _save_costs(tmp_path / "runs" / name)
        os.utime(run / "cost.json", (1e9 - age, 1e9 - age))
    assert doctor.newest_run(tmp_path / "runs") == tmp_path / "runs" / "new"


@pytest.mark.parametrize(
    "content", [None, b"", b"{}", b"\x00\xff" * 99, b"[" * 99_999, b'{"plain": {"counts": [1]}}']
)
def test_a_damaged_cost_model_is_a_finding_with_a_remedy(
    tmp_path: Path, content: bytes | None
) -> None:
    if content is not None:
        (tmp_path / "cost.json").write_bytes(content)
    (found,) = doctor.cost_model(tmp_path)
    assert (found.part, found.level) == ("cost model", "optional")
    assert str(tmp_path / "cost.json") in found.value
    assert found.remedy
