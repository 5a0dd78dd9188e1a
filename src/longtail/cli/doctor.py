"""`longtail doctor`: packages, hardware and self checks, with the remedy for what is missing.

Each line is a finding with a level. The exit code is 1 if a finding has level `missing`. Nothing is
changed.
"""

import argparse
import json
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from longtail.cli.findings import Finding, fact_of
from longtail.system import listening, machine

_PURPOSES = {
    "data": "parquet files and datasets of the hub",
    "reasoning-gym": "data.source and reward of reasoning_gym",
    "math": "reward.name = math_verify",
    "tensorboard": "run.writers = tensorboard",
    "wandb": "run.writers = wandb",
    "plots": "longtail report, drafter eval --plot",
    "cluster": "cluster.workers above 1",
    "serve": "longtail serve, bench serve",
    "gpu": "kernels of an NVIDIA GPU; comes with PyTorch's CUDA build",
}
"""Use of each extra; its packages are read from the metadata of longtail."""


def run(args: argparse.Namespace) -> int:
    """Print the findings; return 1 if a required package is missing or a self check failed."""
    findings = examine(args.run)
    healthy = all(finding.level != "missing" for finding in findings)
    if args.json:
        print(json.dumps({"ok": healthy, "findings": [asdict(f) for f in findings]}))
    else:
        _print(findings, healthy)
    return 0 if healthy else 1


def examine(run_dir: str | None = None) -> list[Finding]:
    """Return all findings in print order, with the cost model and sockets of a run."""
    findings = [*_software(), *_hardware(), *_extras()]
    if all(finding.level != "missing" for finding in findings):
        findings += [attempt("matrix product", _matrix_product), attempt("generation", generation)]
        findings += _gpu_generation()
        findings += cost_model(newest_run() if run_dir is None else Path(run_dir))
    if run_dir is not None:
        findings += sockets(Path(run_dir))
    return findings


def _software() -> Iterator[Finding]:
    least = metadata.metadata("longtail")["Requires-Python"].removeprefix(">=")
    yield _versioned("python", platform.python_version(), least, "install a newer Python")
    for name, version in _requirements(""):
        yield required(name, version)


def _requirements(extra: str) -> list[tuple[str, str]]:
    """Return name and oldest version of each package of an extra; "" is longtail itself."""
    found = []
    for line in metadata.requires("longtail") or ():
        spec, _, marker = line.partition(";")
        if (f'extra == "{extra}"' in marker) if extra else ("extra ==" not in marker):
            match = re.match(r"([\w.-]+)(?:\[.*?\])?\s*(?:>=\s*([\d.]+))?", spec)
            assert match is not None, f"unreadable requirement {line!r}"
            found.append((match[1], match[2] or ""))
    return found


def required(name: str, least: str = "") -> Finding:
    """Return the finding for a package that longtail cannot run without."""
    pip = f"{sys.executable} -m pip install"
    version = _installed(name)
    if version is None:
        remedy = f"{pip} {name}"
        return Finding(part="software", name=name, level="missing", value="absent", remedy=remedy)
    return _versioned(name, version, least, f"{pip} -U {name}")


def _installed(name: str) -> str | None:
    """Return the installed version of a package, None if it is absent."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _versioned(name: str, version: str, least: str, remedy: str) -> Finding:
    """Compare the leading numbers of a version with those of the oldest one admitted."""
    wanted = [int(part) for part in least.split(".") if part]
    numbers = [int(part) for part in re.findall(r"\d+", version)[: len(wanted)]]
    if numbers >= wanted:
        return Finding(part="software", name=name, level="ok", value=version)
    return Finding(
        part="software",
        name=name,
        level="missing",
        value=f"{version}, at least {least} is needed",
        remedy=remedy,
    )


def _hardware() -> Iterator[Finding]:
    fact = partial(fact_of, "hardware")
    memory = machine.memory()
    flags = machine.cpu_flags()
    yield fact("processor", machine.cpu_name())
    yield fact("cores", str(machine.usable_cores()))
    yield fact("instructions", ", ".join(flags) or "none that matter")
    yield fact("memory", f"{_gigabytes(memory.available)} of {_gigabytes(memory.total)} available")
    yield fact("disk", f"{_gigabytes(machine.disk_free(Path('runs')))} free for runs/")
    if find_spec("torch") is not None:
        yield from _torch_facts()


def _torch_facts() -> Iterator[Finding]:
    import torch

    from longtail.model.kernels import native

    fact = partial(fact_of, "hardware")
    yield fact("compute threads", str(torch.get_num_threads()))
    yield fact("oneDNN", "yes" if torch.backends.mkldnn.is_available() else "no")  # type: ignore[no-untyped-call]
    yield fact("vector code", torch.backends.cpu.get_cpu_capability())
    why = native.unavailable_because()
    if why is None and native.functions(torch.float32) is None:
        why = "the C compiler fails on them; its message is printed at first use"
    yield fact("native kernels", "absent, generation is slower" if why else "built here", why or "")
    yield from _precision("CPU")
    if not torch.cuda.is_available():
        yield fact("GPU", "none; everything runs on the CPU")
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free = _gigabytes(torch.cuda.mem_get_info(index)[0])
        size, level = _gigabytes(properties.total_memory), f"{properties.major}.{properties.minor}"
        yield fact(
            f"GPU {index}",
            f"{properties.name}, {free} of {size} free, compute capability {level}",
        )
    if torch.cuda.is_available():
        yield from _precision("GPU")


def _precision(where: str) -> Iterator[Finding]:
    """Yield what `auto` is on the CPU or GPU, for what bfloat16 is fast, and where bits hold."""
    import torch

    from longtail.assembly import precision
    from longtail.model.kernels import native
    from longtail.system.device import DTYPES, multiplies_bfloat16

    fact, device = partial(fact_of, "precision"), torch.device("cpu" if where == "CPU" else "cuda")
    trains, dtype = multiplies_bfloat16(device), precision.fastest_dtype(device)
    yield fact(f"auto on the {where}", f"rollout.dtype = {dtype}, autocast = {str(trains).lower()}")
    rollouts = "fast" if dtype == "bfloat16" else "emulated, up to twice as long as float32"
    yield fact(f"bfloat16 rollouts on the {where}", rollouts)
    training = "in hardware" if trains else "emulated, 12 times as long as float32"
    yield fact(f"bfloat16 training on the {where}", training)
    if where == "GPU":
        yield fact("batch-invariant on the GPU", "with rollout.batch_invariant = true")
        return
    exact = [name for name, dtype in DTYPES.items() if native.layout(dtype) is not None]
    yield fact("batch-invariant", " and ".join(exact) or "no dtype: texts may differ at near-ties")


def _extras() -> Iterator[Finding]:
    for extra, purpose in _PURPOSES.items():
        absent = [name for name, _ in _requirements(extra) if _installed(name) is None]
        yield Finding(
            part="extra",
            name=extra,
            level="optional" if absent else "ok",
            value=f"absent: {purpose}" if absent else purpose,
            remedy=machine.pip_install(extra) if absent else "",
        )


def attempt(name: str, check: Callable[[], str]) -> Finding:
    """Run a self check and return its result, or its failure, as a finding."""
    try:
        return Finding(part="self check", name=name, level="ok", value=check())
    except (
        ArithmeticError,
        AssertionError,
        ImportError,
        OSError,
        RuntimeError,
        ValueError,
    ) as error:
        return Finding(
            part="self check",
            name=name,
            level="missing",
            value=f"{type(error).__name__}: {error}",
            remedy="reinstall torch and longtail; if it stays, please report it",
        )


def _matrix_product() -> str:
    """Return the speed of a matrix product with a known result."""
    import torch

    size = 512
    ones = torch.ones(size, size)
    (ones @ ones).sum()
    started = time.perf_counter()
    product = ones @ ones
    seconds = time.perf_counter() - started
    assert bool((product == size).all()), "a product of ones came out wrong"
    return f"{2 * size**3 / seconds / 1e9:.0f} GFLOP/s in float32"


def _gpu_generation() -> Iterator[Finding]:
    """Generate on the GPU that a run would use, if there is one."""
    import torch

    if torch.cuda.is_available():
        yield attempt("generation on the GPU", partial(generation, "cuda"))


def generation(device: str = "cpu") -> str:
    """Generate the same tokens twice with a random tiny model on a device."""
    import torch

    from longtail.engine.engine import RolloutEngine
    from longtail.engine.limits import EngineLimits
    from longtail.model.transformer import ModelConfig, Transformer
    from longtail.types import Request, SamplingParams

    shape = ModelConfig(
        family="qwen3", vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=2,
        num_heads=2, num_kv_heads=1, head_dim=16, max_positions=64, qk_norm=True,
    )  # fmt: skip
    model = Transformer(shape)
    model.initialize(torch.Generator().manual_seed(0))
    model.to(device)
    limits = EngineLimits(max_running=2, max_step_tokens=16, max_len=64)
    engine = RolloutEngine(model, lambda tokens: " ".join(map(str, tokens)), limits)
    requests = [
        Request(
            request_id=f"{i}",
            prompt_tokens=(1, 2, 3),
            noise_key=7,
            sampling=SamplingParams(max_tokens=16),
        )
        for i in range(2)
    ]
    first, second = engine.generate(requests)
    assert first.tokens == second.tokens, "the same request got two different texts"
    return f"{len(first.tokens)} tokens, twice the same"


def newest_run(under: Path = Path("runs")) -> Path | None:
    """Return the run directory with the newest cost model."""
    found = [(path.stat().st_mtime, path.parent) for path in under.glob("*/cost.json")]
    return max(found)[1] if found else None


def cost_model(run_dir: Path | None) -> Iterator[Finding]:
    """Yield the measured seconds of steps and drafts in a run; an unreadable file is a finding."""
    if run_dir is None:
        return

    from longtail.errors import ConfigError
    from longtail.tuner import cost_file

    fact = partial(fact_of, "cost model")
    try:
        costs = cost_file.load_costs(run_dir / cost_file.FILE)
    except ConfigError as error:
        what, _, remedy = str(error).partition("; ")
        yield fact("run", what, remedy)
        return
    times = cost_file.step_times(costs, (1, 8, 32, 64))
    yield fact("run", str(run_dir))
    plain = ", ".join(f"{each.tokens}: {each.plain_ms:.2f} ms" for each in times)
    verify = ", ".join(f"{each.tokens}: {each.verify_ms:.2f} ms" for each in times)
    yield fact("plain step, by tokens", plain)
    yield fact("verify step, by tokens", verify)
    yield fact("context", cost_file.context_time(costs))
    for place, draft in enumerate(costs.drafts, 1):
        yield fact(f"drafter {place}", cost_file.draft_times(draft))


def sockets(run_dir: Path) -> Iterator[Finding]:
    """Yield the sockets on which the processes of a run listen now."""

    fact = partial(fact_of, "listens")
    process = listening.process_of(run_dir)
    if process is None:
        yield fact("run", f"no process uses {run_dir} now")
        return
    for each in listening.listening(listening.family(process)):
        name = "longtail" if each.pid == process else each.program
        who = "this machine only" if each.is_loopback else "any host that reaches this machine"
        remedy = "" if each.is_loopback else "see SECURITY.md for what may listen beyond loopback"
        yield fact(f"{name} ({each.pid})", f"{each.address} port {each.port}: {who}", remedy)


def _print(findings: Sequence[Finding], healthy: bool) -> None:
    marks = {"ok": "[green]ok[/]", "optional": "[yellow]--[/]", "missing": "[red]MISSING[/]"}
    console = Console()
    table = Table(title="longtail doctor", title_justify="left")
    for column in ("part", "", "what", "found"):
        table.add_column(column)
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
