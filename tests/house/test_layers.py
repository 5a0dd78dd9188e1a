"""Imports go down only: records <- maths <- model <- parts <- machines <- run files <- programs."""

import ast
import graphlib
from pathlib import Path

import pytest

from house.tree import PACKAGE, SOURCES, imported, module_name, own_imports

LAYERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("records", ("", "types", "errors", "strict_json", "machine", "files", "cache")),
    (
        "maths",
        (
            *(
                "transfer",
                "sampling",
                "rl",
                "rl.advantage",
                "rl.loss",
                "rl.packing",
                "engine",
                "model",
            ),
            *("speculation", "speculation.*", "drafter", "drafter.loss", "tuner", "tuner.*"),
        ),
    ),
    ("model", ("model.*",)),
    (
        "parts",
        (
            *("rl.*", "engine.*", "drafter.*", "speculation.drafter", "speculation.grow"),
            *("tiny", "tiny.task", "tiny.tokenizer"),
        ),
    ),
    ("machines", ("rl.learner", "engine.engine", "drafter.trainer", "drafter.spot")),
    (
        "run files",
        ("configfile", "config", "drafter_config", "sft_config", "metrics", "checkpoint"),
    ),
    ("programs", ("*",)),
)
"""From the bottom up; the longest pattern that fits a module decides."""

DOORS = {
    "transformers": ("model.tokenizer", "model.hf*", "bench.*"),
    "safetensors": ("model.hf*", "checkpoint", "drafter.checkpoint"),
    "tokenizers": ("model.tokenizer", "tiny.*", "bench.textmodel"),
    "datasets": ("rl.sources", "rl.data"),
    "pyarrow": ("rl.sources", "rl.data"),
    "reasoning_gym": ("rl.sources", "rl.data", "rl.reward"),
    "math_verify": ("rl.reward",),
    "wandb": ("metrics",),
    "tensorboard": ("metrics",),
    "torch.utils.tensorboard": ("metrics",),
    "pydantic": ("config", "drafter_config", "sft_config", "configfile", "serve.wire"),
    "fastapi": ("serve.*",),
    "starlette": ("serve.*",),
    "uvicorn": ("serve.*",),
    "prometheus_client": ("serve.metrics",),
    "tomli_w": ("configfile",),
    "ctypes": ("model.*", "rl.supervisor"),
    "pickle": ("rl.grader", "rl.grading"),  # over a pipe to their own processes, never a file
    "ray": ("cluster.ray_crew", "cluster.own_ray"),
    "matplotlib": ("plots",),
    "triton": ("model.triton_*",),
}
"""One door per heavy dependency."""

TORCH_FREE = (
    *("", "cli", "cli_parsers", "config", "drafter_config", "sft_config", "configfile"),
    *("errors", "strict_json", "machine", "doctor", "listening"),
    *("serve.setting", "serve.command"),
)


def _fits(module: str, pattern: str) -> bool:
    if pattern.endswith("*"):
        return module.startswith(pattern[:-1])
    return module == pattern


def _layer(module: str) -> int:
    fitting = [
        (len(pattern.rstrip("*")), not pattern.endswith("*"), level)
        for level, (_, patterns) in enumerate(LAYERS)
        for pattern in patterns
        if _fits(module, pattern)
    ]
    return max(fitting)[2]


def _id(path: Path) -> str:
    return module_name(path) or "longtail"


@pytest.mark.parametrize("path", SOURCES, ids=_id)
def test_a_module_imports_from_its_own_layer_or_below(path: Path) -> None:
    module = module_name(path)
    upward = {
        f"{module} ({LAYERS[_layer(module)][0]}) imports {other} ({LAYERS[_layer(other)][0]})"
        for other in own_imports(path)
        if _layer(other) > _layer(module)
    }
    assert not upward


def test_no_two_modules_import_each_other() -> None:
    graph = {module_name(path): own_imports(path) - {module_name(path)} for path in SOURCES}
    packages = {module_name(path.parent / "__init__.py") for path in SOURCES}
    graph = {module: others - packages for module, others in graph.items()}
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError with the cycle


@pytest.mark.parametrize("path", SOURCES, ids=_id)
def test_engine_and_rl_know_neither_each_other_nor_the_configuration(path: Path) -> None:
    module = module_name(path)
    forbidden = {"engine": ("rl", "config"), "rl": ("engine", "config"), "model": ("engine", "rl")}
    roots = forbidden.get(module.partition(".")[0], ())
    assert not {other for other in own_imports(path) if other.partition(".")[0] in roots}


@pytest.mark.parametrize("path", SOURCES, ids=_id)
def test_a_heavy_dependency_is_imported_by_its_door_only(path: Path) -> None:
    module = module_name(path)
    for name in imported(path):
        for package, doors in DOORS.items():
            if name == package or name.startswith(f"{package}."):
                assert any(_fits(module, door) for door in doors), f"{module} imports {name}"


@pytest.mark.parametrize("module", TORCH_FREE)
def test_what_the_command_line_starts_with_does_not_import_torch(module: str) -> None:
    path = PACKAGE.joinpath(*module.split(".")).with_suffix(".py") if module else None
    tree = top_level_imports(path or PACKAGE / "__init__.py")
    heavy = {"torch", "numpy", "transformers", "longtail.types", "jaxtyping"}
    assert not heavy & tree


def top_level_imports(path: Path) -> set[str]:
    """Modules imported when a file is, not inside its functions."""
    nodes = ast.parse(path.read_text(encoding="utf-8")).body
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names
