import os
import re
import sys
from importlib import metadata

import pytest
import torch

from longtail.cli import doctor
from longtail.config.command_options import DoctorOptions
from longtail.model.kernels import native
from longtail.system import machine
from support.tiny_models import save_tiny


def examined() -> dict[str, doctor.Finding]:
    return {finding.name: finding for finding in doctor.examine()}


def test_a_healthy_machine_gets_its_findings_and_exit_code_0(capsys):
    assert doctor.run(DoctorOptions()) == 0
    out = capsys.readouterr().out
    for word in ("python", "torch", "cores", "memory", "native kernels", "extra data"):
        assert word in out
    assert out.endswith("\nready\n")


def test_it_shows_how_texts_of_a_model_end(tmp_path, capsys):
    assert doctor.run(DoctorOptions(model=str(save_tiny(tmp_path)))) == 0
    out = capsys.readouterr().out
    assert re.search(r"end tokens +<eos> = 1\n.*behind an answer +'<eos>'\n", out)
    assert "rows of a step are free" in out


def test_it_advises_one_worker_for_each_node_of_memory_with_usable_cores(tmp_path, monkeypatch):
    for node, cores in enumerate(("0-1,4", "2-3", "90-99", "")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(f"{cores}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 4, 5}, raising=False)
    assert machine.numa_nodes(tmp_path) == [{0, 1, 4}, {2}]
    assert machine.numa_nodes(tmp_path / "none") == [{0, 1, 2, 4, 5}]
    monkeypatch.setattr(machine, "numa_nodes", lambda: [{0}, {1}])
    assert examined()["fastest on CPUs"].value.startswith("cluster.workers = 2: one for each")


@pytest.mark.parametrize(
    ("version", "value", "level"),
    [
        ("0.32.0", "(0.32.0)", "ok"),
        ("0.30.0", "of which 0.30.0 is not known", "optional"),
        (None, "which is absent", "optional"),
    ],
)
def test_it_says_what_a_machine_with_gpus_would_run(monkeypatch, version, value, level):
    monkeypatch.setattr(doctor, "_installed", lambda name: version)
    found = doctor._training_on_gpus(2)
    assert found.value.startswith("cluster.workers = 2: one for each GPU")
    assert found.value.endswith(value)
    assert found.level == level


def test_it_says_in_which_dtypes_a_text_does_not_depend_on_its_batch(monkeypatch):
    monkeypatch.setattr(native, "layout", {torch.float32: "inputs"}.get)
    assert examined()["batch-invariant"].value == "float32"
    monkeypatch.setattr(native, "layout", lambda dtype: None)
    assert examined()["batch-invariant"].value == "no dtype: completions may differ at near-ties"


def test_an_absent_extra_comes_with_the_command_and_is_no_failure(capsys, monkeypatch):
    _change_version(monkeypatch, "math-verify", None)
    assert doctor.run(DoctorOptions()) == 0
    assert f"{sys.executable} -m pip install" in capsys.readouterr().out
    found = examined()
    assert found["extra math"].level == "optional"
    assert found["extra math"].remedy.endswith("[math]'")
    assert found["extra tensorboard"].remedy == ""


@pytest.mark.parametrize(
    ("version", "value"), [("2.9.1+cpu", "2.9.1+cpu, >=2.10 is needed"), (None, "absent")]
)
def test_a_torch_that_is_absent_or_too_old_fails_with_the_command(
    capsys, monkeypatch, version, value
):
    _change_version(monkeypatch, "torch", version)
    assert doctor.run(DoctorOptions()) == 1
    assert "not ready: see the lines marked MISSING" in capsys.readouterr().out
    found = examined()["torch"]
    assert (found.value, found.level) == (value, "missing")
    assert found.remedy.endswith("pip install -U torch")


def _change_version(monkeypatch: pytest.MonkeyPatch, package: str, changed: str | None) -> None:
    """Have another version of a package installed, or none."""
    version = metadata.version

    def changed_version(name: str) -> str:
        if name == package and changed is None:
            raise metadata.PackageNotFoundError(name)
        return changed if name == package and changed else version(name)

    monkeypatch.setattr(metadata, "version", changed_version)
