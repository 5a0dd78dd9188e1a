"""`longtail doctor --vllm PYTHON`: what longtail can do in the vLLM of another environment."""

import json
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import longtail
from longtail.cli.findings import Finding, Level
from longtail.errors import ConfigError
from longtail.integrations.vllm import probe

_TIMEOUT_S = 300.0
_PART = "vLLM"
_ABILITIES = {
    "adopt": "adopt a drafter while running",
    "transfer": "the same by vLLM's draft weight calls",
    "metrics": "longtail's metrics beside vLLM's",
}
_RUNNERS = {"v1": "model runner V1", "v2": "model runner V2"}


def vllm_findings(python: str) -> list[Finding]:
    """Ask an interpreter; ConfigError if it cannot be run."""
    return list(_findings(python, ask(python)))


def ask(python: str) -> dict[str, Any]:
    """Return the facts of `integrations.vllm.probe`, run in that interpreter."""
    folder = Path(longtail.__file__).parent.parent
    try:
        done = subprocess.run(
            [python, "-I", probe.__file__, str(folder)],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(
            f"--vllm = {python!r} cannot be run ({error}); name the python of an environment "
            "with vLLM"
        ) from error
    try:
        facts: dict[str, Any] = json.loads(done.stdout)
    except ValueError as error:
        last_lines = " ".join(done.stderr.splitlines()[-3:])
        raise ConfigError(
            f"--vllm = {python!r} gave no answer (exit code {done.returncode}): {last_lines}"
        ) from error
    return facts


def _findings(python: str, facts: Mapping[str, Any]) -> Iterator[Finding]:
    if facts["vllm"] is None:
        yield _finding("vllm", "missing", facts["reason"], f"{python} -m pip install vllm")
        return
    yield _finding("vllm", "ok", f"{facts['vllm']} on {facts['platform']}")
    if facts["registered"]:
        yield _finding("plugin", "ok", "vLLM loads it; switch it on with LONGTAIL_VLLM=coupled")
    else:
        remedy = f"{python} -m pip install longtail"
        yield _finding("plugin", "missing", "longtail is not installed there", remedy)
    used = "v2" if facts["triton"] else "v1"
    for runner, name in _RUNNERS.items():
        yield _runner(name, facts[runner], is_used=runner == used)
    if not facts[used]:
        yield _finding("texts equal to plain decoding", "ok", _equality(facts))
    for key, name in _ABILITIES.items():
        level: Level = "optional" if facts[key] else "ok"
        yield _finding(name, level, facts[key] or "yes")
    if defects := facts.get("defects"):
        yield _finding("defects of its CPU path", "ok", f"stepped round: {'; '.join(defects)}")


def _runner(name: str, reason: str, *, is_used: bool) -> Finding:
    """Return whether drafts can be coupled in a model runner of vLLM."""
    used = "used here" if is_used else "not used here"
    if not reason:
        return _finding(name, "ok", f"coupled drafts, {used}")
    level: Level = "missing" if is_used else "optional"
    return _finding(name, level, f"{used}: {reason}")


def _equality(facts: Mapping[str, Any]) -> str:
    if facts["platform"] == "cpu":
        return "in float32; in bfloat16 with block_rows = 32, which is slower"
    return "with VLLM_BATCH_INVARIANT=1; without it drafts change roundings at near-ties"


def _finding(name: str, level: Level, value: str, remedy: str = "") -> Finding:
    return Finding(part=_PART, name=name, level=level, value=value, remedy=remedy)
