"""`longtail doctor --vllm PYTHON` on stand-ins for the interpreter of another environment."""

import json
import sys
from argparse import Namespace

import pytest

from longtail.cli import doctor
from longtail.cli.vllm_findings import vllm_findings
from longtail.errors import ConfigError
from longtail.integrations.vllm import probe

FACTS = {
    "python": "3.12.1", "vllm": "0.32.0", "registered": True, "platform": "cpu", "triton": False,
    "v1": "", "v2": "", "adopt": "", "transfer": "", "metrics": "",
    "defects": ["temperatures of verified rows are lost"],
}  # fmt: skip


@pytest.fixture
def python(tmp_path):
    """Return a function that makes an interpreter with an answer of its own."""

    def make(answer, code=0):
        file = tmp_path / "python"
        (tmp_path / "answer").write_text(answer)
        file.write_text(f"#!/bin/sh\ncat {tmp_path}/answer\necho broken >&2\nexit {code}\n")
        file.chmod(0o755)
        return str(file)

    return make


def by_name(found):
    return {each.name: each for each in found}


def test_a_cpu_wheel_runs_v1_with_all_parts(python):
    found = by_name(vllm_findings(python(json.dumps(FACTS))))
    assert {each.level for each in found.values()} == {"ok"}
    assert found["model runner V1"].value == "coupled drafts, used here"
    assert "in float32" in found["texts equal to plain decoding"].value
    assert "temperatures" in found["defects of its CPU path"].value


def test_the_runner_that_is_used_must_fit_and_the_other_may_not(python):
    facts = {**FACTS, "platform": "cuda", "triton": True, "v1": "this vLLM has no _sample"}
    found = by_name(vllm_findings(python(json.dumps(facts))))
    assert found["model runner V1"].level == "optional"
    assert found["model runner V2"].level == "ok"
    assert "VLLM_BATCH_INVARIANT" in found["texts equal to plain decoding"].value
    facts = {**FACTS, "v1": "this vLLM has no _sample"}
    found = by_name(vllm_findings(python(json.dumps(facts))))
    assert found["model runner V1"].level == "missing"
    assert "no _sample" in found["model runner V1"].value


@pytest.mark.parametrize(
    ("facts", "name"), [({"vllm": None, "reason": "ModuleNotFoundError"}, "vllm"),
                        ({**FACTS, "registered": False}, "plugin")]
)  # fmt: skip
def test_what_is_missing_comes_with_its_remedy_and_exit_code_1(python, facts, name, capsys):
    interpreter = python(json.dumps(facts))
    assert doctor.run(Namespace(json=True, run=None, vllm=interpreter)) == 1
    found = {each["name"]: each for each in json.loads(capsys.readouterr().out)["findings"]}
    assert found[name]["level"] == "missing"
    assert found[name]["remedy"].startswith(interpreter)


def test_an_interpreter_that_does_not_answer_is_named(python):
    with pytest.raises(ConfigError, match=r"gave no answer \(exit code 3\): broken"):
        vllm_findings(python("", 3))
    with pytest.raises(ConfigError, match="cannot be run"):
        vllm_findings("/nowhere/python")


def test_the_probe_says_why_nothing_works_without_vllm(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    found = probe.facts("/nowhere")
    assert found["vllm"] is None
    assert "ModuleNotFoundError" in found["reason"]
