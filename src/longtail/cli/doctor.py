"""`longtail doctor`: packages, hardware and a self check, with the remedy for what is missing.

Each line is a finding with a level. The exit code is 1 if a finding has level `missing`. Nothing is
changed.
"""

import json
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from longtail.cli.options import DoctorOptions
from longtail.system import machine

_PURPOSES = {
    "data": "parquet files and datasets of the hub",
    "reasoning-gym": "data.source and reward of reasoning_gym",
    "math": "reward.name = math_verify",
    "tensorboard": "run.writers = tensorboard",
    "wandb": "run.writers = wandb",
    "plots": "longtail bench e2e --plot",
    "cluster": "cluster.workers above 1",
    "serve": "longtail serve, longtail view",
    "gpu": "kernels of an NVIDIA GPU; comes with PyTorch's CUDA build",
}
"""Use of each extra; its packages are read from the metadata of longtail."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Example: Finding("extra", "math", "absent", "optional", "pip install 'longtail[math]'")
    """

    part: str
    name: str
    value: str
    level: Literal["ok", "optional", "missing"] = "ok"
    remedy: str = ""


def run(options: DoctorOptions) -> int:
    """Print the findings; return 1 if a required package is missing or the self check failed."""
    findings = list(examine())
    healthy = all(finding.level != "missing" for finding in findings)
    if options.json:
        print(json.dumps({"ok": healthy, "findings": [asdict(f) for f in findings]}))
    else:
        _print(findings, healthy)
    return 0 if healthy else 1


def examine() -> Iterator[Finding]:
    """Yield all findings about this environment."""
    software = [*_software()]
    yield from software
    yield from _hardware()
    if all(finding.level == "ok" for finding in software):
        yield from _torch_facts()
        yield self_check()
    for extra, purpose in _PURPOSES.items():
        found = {each.name: _installed(each.name) for each in _requirements(extra)}
        if None in found.values():
            remedy = machine.pip_install(extra)
            yield Finding("extra", extra, f"absent: {purpose}", "optional", remedy)
        else:
            versions = ", ".join(f"{name} {version}" for name, version in found.items())
            yield Finding("extra", extra, f"{purpose} ({versions})")


def _software() -> Iterator[Finding]:
    needed = metadata.metadata("longtail")["Requires-Python"]
    yield _package("python", platform.python_version(), needed, "install a newer Python")
    for each in _requirements(""):
        remedy = f"{sys.executable} -m pip install -U {each.name}"
        yield _package(each.name, _installed(each.name), str(each.specifier), remedy)


def _requirements(extra: str) -> list[Requirement]:
    """Return the packages of an extra; "" is longtail itself."""
    return [
        each
        for each in map(Requirement, metadata.requires("longtail") or ())
        if (f'extra == "{extra}"' in str(each.marker) if extra else each.marker is None)
    ]


def _installed(name: str) -> str | None:
    """Return the installed version of a package, None if it is absent."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _package(name: str, version: str | None, needed: str, remedy: str) -> Finding:
    """Compare a version with those that are admitted."""
    if version is None:
        return Finding("software", name, "absent", "missing", remedy)
    if SpecifierSet(needed).contains(version, prereleases=True):
        return Finding("software", name, version)
    return Finding("software", name, f"{version}, {needed} is needed", "missing", remedy)


def _hardware() -> Iterator[Finding]:
    memory = machine.memory()
    for name, value in {
        "processor": machine.cpu_name(),
        "cores": str(machine.usable_cores()),
        "instructions": ", ".join(machine.cpu_flags()) or "none that matter",
        "memory": f"{_gigabytes(memory.available)} of {_gigabytes(memory.total)} available",
        "disk": f"{_gigabytes(machine.disk_free(Path('runs')))} free for runs/",
    }.items():
        yield Finding("hardware", name, value)


def _torch_facts() -> Iterator[Finding]:
    """Yield threads, native kernels, GPUs, what `auto` is and in which dtypes texts are exact."""
    import torch

    from longtail.assembly import precision
    from longtail.model.kernels import native
    from longtail.system.device import DTYPES, multiplies_bfloat16

    yield Finding("hardware", "compute threads", str(torch.get_num_threads()))
    why = native.unavailable_because()
    if why is None and native.functions(torch.float32) is None:
        why = "the C compiler fails on them; its message is printed at first use"
    if why is None:
        yield Finding("hardware", "native kernels", "built here")
    else:
        slower = "absent, generation is slower"
        yield Finding("hardware", "native kernels", slower, "optional", why)
    devices = ["cpu"]
    for index in range(torch.cuda.device_count()):
        free, total = map(_gigabytes, torch.cuda.mem_get_info(index))
        value = f"{torch.cuda.get_device_name(index)}, {free} of {total} free"
        yield Finding("hardware", f"GPU {index}", value)
        devices = ["cpu", "cuda"]
    for device in map(torch.device, devices):
        trains, dtype = multiplies_bfloat16(device), precision.fastest_dtype(device)
        value = f"rollout.dtype = {dtype}, autocast = {str(trains).lower()}"
        yield Finding("precision", f"auto on {device}", value)
        rollouts = "fast" if dtype == "bfloat16" else "emulated, up to twice as long as float32"
        training = "in hardware" if trains else "emulated, 12 times as long as float32"
        value = f"rollouts {rollouts}; training {training}"
        yield Finding("precision", f"bfloat16 on {device}", value)
    exact = [name for name, dtype in DTYPES.items() if native.layout(dtype) is not None]
    value = " and ".join(exact) or "no dtype: texts may differ at near-ties"
    yield Finding("precision", "batch-invariant", value)


def self_check() -> Finding:
    """Generate twice with a random tiny model; a failure is a finding."""
    try:
        return Finding("self check", "generation", _generated())
    except (ArithmeticError, AssertionError, ImportError, OSError, RuntimeError, ValueError) as e:
        remedy = "reinstall torch and longtail; if it stays, please report it"
        return Finding("self check", "generation", f"{type(e).__name__}: {e}", "missing", remedy)


def _generated() -> str:
    import torch

    from longtail.engine.engine import RolloutEngine
    from longtail.engine.request import EngineLimits
    from longtail.model.transformer import ModelConfig, Transformer
    from longtail.types import Request, SamplingParams

    shape = ModelConfig(
        family="qwen3", vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=2,
        num_heads=2, num_kv_heads=1, head_dim=16, max_positions=64, qk_norm=True,
    )  # fmt: skip
    model = Transformer(shape)
    model.initialize(torch.Generator().manual_seed(0))
    limits = EngineLimits(max_running=2, max_step_tokens=16, max_len=64)
    engine = RolloutEngine(model, lambda tokens: " ".join(map(str, tokens)), limits)
    sampling, prompt = SamplingParams(max_tokens=16), (1, 2, 3)
    requests = [
        Request(request_id=name, prompt_tokens=prompt, noise_key=7, sampling=sampling)
        for name in "ab"
    ]
    first, second = engine.generate(requests)
    assert first.tokens == second.tokens, "the same request got two different texts"
    return f"{len(first.tokens)} tokens, twice the same"


def _print(findings: Sequence[Finding], healthy: bool) -> None:
    marks = {"ok": "[green]ok[/]", "optional": "[yellow]--[/]", "missing": "[red]MISSING[/]"}
    console = Console()
    table = Table("part", "", "what", "found", title="longtail doctor", title_justify="left")
    part = ""
    for finding in findings:
        if finding.part != part:
            table.add_section()
        shown = finding.part if finding.part != part else ""
        part = finding.part
        table.add_row(shown, marks[finding.level], finding.name, escape(finding.value))
    console.print(table)
    for finding in findings:
        if finding.remedy:
            line = f"{marks[finding.level]} {finding.name}: {escape(finding.remedy)}"
            console.print(line, soft_wrap=True)
    console.print("ready" if healthy else "not ready: see the lines marked MISSING")


def _gigabytes(size: int | None) -> str:
    return "?" if size is None else f"{size / 1e9:.1f} GB"
