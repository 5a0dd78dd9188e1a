"""`longtail doctor`: packages, hardware, kernels and dtypes, with remedies; facts of a model.

The exit code is 1 if a finding has level `missing`. Nothing is changed.
"""

import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from longtail.config.command_options import DoctorOptions
from longtail.errors import UnsupportedModelError
from longtail.system import machine

_PURPOSES = {
    "data": "parquet files and datasets of the hub",
    "reasoning-gym": "data.source and reward of reasoning_gym",
    "math": "reward.name = math_verify",
    "tensorboard": "run.writers = tensorboard",
    "wandb": "run.writers = wandb",
    "cluster": "cluster.workers above 1",
    "serve": "longtail serve, longtail view",
}
"""Use of each extra; its packages are read from the metadata of longtail."""
_MARKS = {"ok": "[green]ok[/]     ", "optional": "[yellow]--[/]     ", "missing": "[red]MISSING[/]"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    name: str
    value: str
    level: Literal["ok", "optional", "missing"] = "ok"
    remedy: str = ""


def run(options: DoctorOptions) -> int:
    """Print the findings; return 1 if a required package is missing."""
    console, healthy = Console(), True
    of_model = () if options.model is None else _model_facts(options.model)
    for each in (*examine(), *of_model):
        line = f"{_MARKS[each.level]}  {each.name:22}{escape(each.value)}"
        console.print(line, soft_wrap=True, highlight=False)
        if each.remedy:
            console.print(f"{'':9}-> {escape(each.remedy)}", soft_wrap=True, highlight=False)
        healthy &= each.level != "missing"
    if options.model is not None:
        console.print(_limits(options.model))
    console.print("ready" if healthy else "not ready: see the lines marked MISSING")
    return 0 if healthy else 1


def examine() -> Iterator[Finding]:
    """Yield all findings about this environment."""
    needed = metadata.metadata("longtail")["Requires-Python"]
    software = [_package("python", platform.python_version(), needed, "install a newer Python")]
    for each in _requirements(""):
        remedy = f"{sys.executable} -m pip install -U {each.name}"
        version = _installed(each.name)
        software.append(_package(each.name, version, str(each.specifier), remedy))
    yield from software
    memory = machine.memory()
    yield Finding("processor", f"{machine.cpu_name()}, {machine.usable_cores()} cores")
    nodes = len(machine.numa_nodes())
    why = "one for each node of memory" if nodes > 1 else "one that computes on all cores"
    yield Finding("fastest on CPUs", f"cluster.workers = {nodes}: {why}")
    yield Finding("instructions", ", ".join(machine.cpu_flags()) or "none that kernels use")
    yield Finding("memory", f"{_size(memory.available)} of {_size(memory.total)} available")
    if all(finding.level == "ok" for finding in software):
        yield from _torch_facts()
    for extra, purpose in _PURPOSES.items():
        found = {each.name: _installed(each.name) for each in _requirements(extra)}
        if None in found.values():
            remedy = machine.pip_install(extra)
            yield Finding(f"extra {extra}", f"absent: {purpose}", "optional", remedy)
        else:
            versions = ", ".join(f"{name} {version}" for name, version in found.items())
            yield Finding(f"extra {extra}", f"{purpose} ({versions})")


def _model_facts(name: str) -> Iterator[Finding]:
    """Yield the tokens that end a completion of a model."""
    from longtail.model.hf.tokenizer import load_tokenizer
    from longtail.run.base_model import model_directory

    tokenizer = load_tokenizer(model_directory(name, field="MODEL"))
    ends = [f"{tokenizer.token_bytes(each).decode()} = {each}" for each in tokenizer.eos_ids]
    remedy = "" if ends else "set eos_token in tokenizer_config.json"
    value = ", ".join(ends) or "no token: completions end at max_tokens"
    yield Finding("end tokens", value, "ok" if ends else "optional", remedy)
    turn = repr(tokenizer.ends.turn) if tokenizer.has_chat_template else "no chat template"
    yield Finding("behind an answer", turn)


def _limits(name: str) -> Table | str:
    """Return what this machine can generate at most with a model, and drafts can gain."""
    import torch

    from longtail.assembly.precision import fastest_dtype
    from longtail.model.hf.model import load_config
    from longtail.model.roofline import limit_of, measure
    from longtail.run.base_model import model_directory
    from longtail.system.device import DTYPES, choose_device

    try:
        shape = load_config(model_directory(name, field="MODEL"))
    except UnsupportedModelError as error:
        return f"no limit: {error}"
    device = choose_device("auto")
    dtype = fastest_dtype(device)
    speed = measure(device, DTYPES[dtype])
    limit = limit_of(shape, DTYPES[dtype], speed)
    table = Table("running", "tokens/s at most", "drafts gain at most", title_justify="left")
    table.title = (
        f"{dtype} on {device}, {torch.get_num_threads()} threads: "
        f"{speed.flop_per_s / 1e9:,.0f} GFLOP/s, {speed.bytes_per_s / 1e9:,.0f} GB/s; "
        f"{limit.free_rows:.0f} rows of a step are free"
    )
    for running in (1, 2, 4, 8, 16, 32, 64):
        most = f"{limit.tokens_per_s(running):,.0f}"
        table.add_row(str(running), most, f"{limit.gain(running):.1f}x")
    return table


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
        return Finding(name, "absent", "missing", remedy)
    if SpecifierSet(needed).contains(version, prereleases=True):
        return Finding(name, version)
    return Finding(name, f"{version}, {needed} is needed", "missing", remedy)


def _torch_facts() -> Iterator[Finding]:
    """Yield native kernels, GPUs, what `auto` is, and the dtypes with exact completions."""
    import torch

    from longtail.assembly import precision
    from longtail.model.kernels import native
    from longtail.model.kernels.build import LEVELS
    from longtail.system.device import DTYPES, multiplies_bfloat16

    why = native.unavailable_because()
    if why is None and native.functions(torch.float32) is None:
        why = "the C compiler fails on them; its message is printed at first use"
    if why is None:
        name = native.build_name()
        shipped = any(name.startswith(f"{level}-") for level in LEVELS)
        yield Finding("native kernels", f"of the wheel ({name})" if shipped else "built here")
    else:
        yield Finding("native kernels", "absent, generation is slower", "optional", why)
    devices, num_gpus = ["cpu"], torch.cuda.device_count()
    for index in range(num_gpus):
        free, total = map(_size, torch.cuda.mem_get_info(index))
        name = torch.cuda.get_device_name(index)
        yield Finding(f"GPU {index}", f"{name}, {free} of {total} free")
    if num_gpus:
        yield _training_on_gpus(num_gpus)
        devices.append("cuda")
    for device in map(torch.device, devices):
        trains, dtype = multiplies_bfloat16(device), precision.fastest_dtype(device)
        value = f"rollout.dtype = {dtype}, autocast = {str(trains).lower()}"
        yield Finding(f"auto on {device}", value)
        rollouts = "fast" if dtype == "bfloat16" else "emulated, up to twice as long as float32"
        training = "in hardware" if trains else "emulated, 12 times as long as float32"
        yield Finding(f"bfloat16 on {device}", f"rollouts {rollouts}; training {training}")
    exact = [name for name, dtype in DTYPES.items() if native.layout(dtype) is not None]
    value = " and ".join(exact) or "no dtype: completions may differ at near-ties"
    yield Finding("batch-invariant", value)


def _training_on_gpus(count: int) -> Finding:
    """Return what `longtail train` runs on the GPUs of this machine."""
    from longtail.vllm.patching import TRAINS, trains_with

    value = f"cluster.workers = {count}: one for each GPU; vLLM generates"
    version = _installed("vllm")
    if version is not None and trains_with(version):
        return Finding("training on GPUs", f"{value} ({version})")
    known = "which is absent" if version is None else f"of which {version} is not known"
    return Finding("training on GPUs", f"{value}, {known}", "optional", f"install vLLM {TRAINS}")


def _size(num_bytes: int | None) -> str:
    return "?" if num_bytes is None else f"{num_bytes / 1e9:.1f} GB"
