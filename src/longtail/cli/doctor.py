"""`longtail doctor`: what this machine offers, what is missing, and the command that gets it.

Every line is a finding with a level; one at level `missing` makes the exit code 1. It looks and
tries, and changes nothing.
"""

import json
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from longtail.system import listening, machine

Level = Literal["ok", "optional", "missing"]

_PYTHON = (3, 11)
_TORCH = (2, 10)
_REQUIRED = (
    "torch", "numpy", "transformers", "tokenizers", "safetensors", "jinja2", "pydantic", "tomli-w",
    "jaxtyping", "rich",
)  # fmt: skip
_EXTRAS: dict[str, tuple[tuple[str, ...], str]] = {
    "data": (("datasets", "pyarrow"), "parquet files and datasets of the hub"),
    "reasoning-gym": (("reasoning_gym",), "data.source and reward of reasoning_gym"),
    "math": (("math_verify",), "reward.name = math_verify"),
    "tensorboard": (("tensorboard",), "run.writers = tensorboard"),
    "wandb": (("wandb",), "run.writers = wandb"),
    "plots": (("matplotlib",), "longtail report, drafter eval --plot"),
    "cluster": (("ray",), "cluster.workers above 1"),
    "serve": (("fastapi", "uvicorn", "prometheus_client"), "longtail serve, bench serve"),
    "gpu": (("triton",), "kernels of an NVIDIA GPU; comes with PyTorch's CUDA build"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the report.

    Example: Finding(part="extra", name="math", level="optional", value="absent",
                     remedy="pip install 'longtail[math]'")
    """

    part: str
    name: str
    level: Level
    value: str
    remedy: str = ""


def run(*, as_json: bool, run_dir: str | None = None) -> int:
    """Print the findings; return 1 if something that longtail needs is missing."""
    findings = examine(run_dir)
    healthy = all(finding.level != "missing" for finding in findings)
    if as_json:
        print(json.dumps({"ok": healthy, "findings": [asdict(f) for f in findings]}))
    else:
        _print(findings, healthy)
    return 0 if healthy else 1


def examine(run_dir: str | None = None) -> list[Finding]:
    """Look at everything, in the order in which it is printed; at a run's cost model, too."""
    findings = [*_software(), *_hardware(), *_extras()]
    if all(finding.level != "missing" for finding in findings):
        findings += [attempt("matrix product", _matrix_product), attempt("generation", generation)]
        findings += _gpu_generation()
        findings += cost_model(newest_run() if run_dir is None else Path(run_dir))
    if run_dir is not None:
        findings += sockets(Path(run_dir))
    return findings


def _software() -> Iterator[Finding]:
    yield _versioned("python", platform.python_version(), _PYTHON, "install a newer Python")
    yield from map(required, _REQUIRED)


def required(name: str) -> Finding:
    """Look for a package that longtail cannot do without, and at its version."""
    pip = f"{sys.executable} -m pip install"
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        remedy = f"{pip} {name}"
        return Finding(part="software", name=name, level="missing", value="absent", remedy=remedy)
    return _versioned(name, version, _TORCH if name == "torch" else (), f"{pip} -U {name}")


def _versioned(name: str, version: str, least: tuple[int, ...], remedy: str) -> Finding:
    """Compare the leading numbers of a version with the least that will do."""
    numbers = tuple(int(part) for part in version.split(".")[: len(least)] if part.isdigit())
    if numbers >= least:
        return Finding(part="software", name=name, level="ok", value=version)
    wanted = ".".join(map(str, least))
    return Finding(
        part="software",
        name=name,
        level="missing",
        value=f"{version}, at least {wanted} is needed",
        remedy=remedy,
    )


def _hardware() -> Iterator[Finding]:
    def fact(name: str, value: str, remedy: str = "") -> Finding:
        level: Level = "optional" if remedy else "ok"
        return Finding(part="hardware", name=name, level=level, value=value, remedy=remedy)

    memory = machine.memory()
    flags = machine.cpu_flags()
    yield fact("processor", machine.cpu_name())
    yield fact("cores", str(machine.usable_cores()))
    yield fact("instructions", ", ".join(flags) or "none that matter")
    fast = {"avx512_bf16", "amx_bf16", "bf16"} & set(flags)
    slow = "" if fast else "keep rollout.dtype = float32 on this processor"
    yield fact("bfloat16 on the CPU", "native" if fast else "emulated, slow", slow)
    yield fact("memory", f"{_gigabytes(memory.available)} of {_gigabytes(memory.total)} available")
    yield fact("disk", f"{_gigabytes(machine.disk_free(Path('runs')))} free for runs/")
    if find_spec("torch") is not None:
        yield from _torch_facts(fact)


def _torch_facts(fact: Callable[..., Finding]) -> Iterator[Finding]:
    import torch

    from longtail.model.kernels import native
    from longtail.system.device import DTYPES

    yield fact("compute threads", str(torch.get_num_threads()))
    yield fact("oneDNN", "yes" if torch.backends.mkldnn.is_available() else "no")  # type: ignore[no-untyped-call]
    yield fact("vector code", torch.backends.cpu.get_cpu_capability())
    why = native.unavailable_because()
    if why is None and native.functions(torch.float32) is None:
        why = "the C compiler refuses them: it says why where they are first used"
    yield fact("native kernels", "absent, generation is slower" if why else "built here", why or "")
    exact = [name for name, dtype in DTYPES.items() if native.layout(dtype) is not None]
    yield fact("batch-invariant", " and ".join(exact) or "no dtype: texts may differ at near-ties")
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


def _extras() -> Iterator[Finding]:
    for extra, (modules, purpose) in _EXTRAS.items():
        absent = [module for module in modules if find_spec(module) is None]
        yield Finding(
            part="extra",
            name=extra,
            level="optional" if absent else "ok",
            value=f"absent: {purpose}" if absent else purpose,
            remedy=machine.pip_install(extra) if absent else "",
        )


def attempt(name: str, check: Callable[[], str]) -> Finding:
    """Run a self check; its failure is a finding, whatever it is."""
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
    """Time a product whose result is known."""
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
    """Let the engine write on the GPU that a run would use, if there is one."""
    import torch

    if torch.cuda.is_available():
        yield attempt("generation on the GPU", partial(generation, "cuda"))


def generation(device: str = "cpu") -> str:
    """Let a random tiny model write a few tokens on a device, twice the same."""
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
    assert first.tokens == second.tokens, "the same request was answered in two ways"
    return f"{len(first.tokens)} tokens, twice the same"


def newest_run(under: Path = Path("runs")) -> Path | None:
    """Return the directory of the run that wrote its cost model last."""
    found = [(path.stat().st_mtime, path.parent) for path in under.glob("*/cost.json")]
    return max(found)[1] if found else None


def cost_model(run_dir: Path | None) -> Iterator[Finding]:
    """Tell what steps and drafts cost in a run; what cannot be read is a finding."""
    if run_dir is None:
        return

    from longtail.errors import ConfigError
    from longtail.tuner import cost_file

    def fact(name: str, value: str, remedy: str = "") -> Finding:
        level: Level = "optional" if remedy else "ok"
        return Finding(part="cost model", name=name, level=level, value=value, remedy=remedy)

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
    """Tell on which sockets the processes of a run listen at present."""

    def fact(name: str, value: str, remedy: str = "") -> Finding:
        level: Level = "optional" if remedy else "ok"
        return Finding(part="listens", name=name, level=level, value=value, remedy=remedy)

    process = listening.process_of(run_dir)
    if process is None:
        yield fact("run", f"no process works in {run_dir} at present")
        return
    for each in listening.listening(listening.family(process)):
        name = "longtail" if each.pid == process else each.program
        who = "this machine only" if each.is_loopback else "whoever reaches this machine"
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
