import json
import sys
from importlib import metadata

import pytest

from longtail import doctor, machine


def test_a_healthy_machine_gets_a_table_and_exit_code_0(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert doctor.run(as_json=False) == 0
    out = capsys.readouterr().out
    for word in ("python", "torch", "cores", "memory", "extra", "self check", "ready"):
        assert word in out


def test_json_holds_the_same_findings(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.run(as_json=True) == 0
    report = json.loads(capsys.readouterr().out)
    names = {finding["name"] for finding in report["findings"]}
    assert report["ok"] is True
    assert {"python", "torch", "generation", "matrix product", "data", "wandb"} <= names
    assert all(finding["value"] for finding in report["findings"])


def test_an_absent_extra_comes_with_the_command_and_is_no_failure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda name: None if name == "math_verify" else "spec")
    assert doctor.run(as_json=False) == 0
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
    assert doctor.run(as_json=False) == 1
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
