"""vLLM's sampling modules without an installed vLLM: real files, stand-ins for all they import.

Triton's interpreter runs the kernels (tests/conftest.py switches it on).
"""

import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl

from vllm_sources.interpreter import hasten, log1p

GPU = "vllm.v1.worker.gpu"
REAL = (
    "vllm.model_executor.warmup.jit_warmup",
    "vllm.model_executor.warmup.jit_warmup_triton_helper", "vllm.utils.math_utils",
    "vllm.v1.outputs", "vllm.v1.sample.ops.topk_topp_sampler",
    "vllm.v1.sample.ops.topk_topp_triton", f"{GPU}.input_batch", f"{GPU}.sample.gumbel",
    f"{GPU}.sample.logprob", f"{GPU}.sample.min_p", f"{GPU}.sample.output",
    f"{GPU}.sample.sampler", f"{GPU}.sample.states", f"{GPU}.spec_decode.rejection_sampler",
    f"{GPU}.spec_decode.rejection_sampler_utils", f"{GPU}.spec_decode.speculator",
)  # fmt: skip
"""Modules that are loaded from vLLM's sources, where a release has them."""


class Memory:
    """vLLM's tensor in memory that both host and device address."""

    def __init__(self, size: Any, dtype: torch.dtype, *_: Any, **__: Any) -> None:
        self.gpu = self.cpu = torch.zeros(size, dtype=dtype)
        self.np = self.cpu.numpy()

    def copy_to_uva(self, n: int | None = None) -> torch.Tensor:
        return self.gpu[:n]


class _Absent(type):
    """Type of stand-ins: false, empty, callable, usable as a base, a decorator and a context."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __call__(cls, *args: Any, **options: Any) -> Any:
        if not vars(cls).get("stand_in"):  # a class of vLLM that has a stand-in as its base
            return type.__call__(cls, *args, **options)
        decorated = len(args) == 1 and not options and callable(args[0])
        return args[0] if decorated else cls

    def __getitem__(cls, _key: Any) -> Any:
        return cls

    def __bool__(cls) -> bool:
        return not vars(cls).get("stand_in")

    def __iter__(cls) -> Any:
        return iter(())

    def __enter__(cls) -> Any:
        return cls

    def __exit__(cls, *_: Any) -> None:
        return None


def absent(name: str) -> Any:
    """Return a stand-in for something of vLLM that no tested code relies on."""
    return _Absent(name, (), {"stand_in": True})


class _StandIn(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, absent(name))
        return vars(self)[name]


_GIVEN: dict[str, dict[str, Any]] = {
    "vllm.triton_utils": {
        "HAS_TRITON": True,
        "tl": tl,
        "triton": triton,
        "tldevice": SimpleNamespace(log1p=log1p),
    },
    "vllm.config.model": {"PROCESSED_LOGPROBS_MODES": ("processed_logits", "processed_logprobs")},
    "vllm.utils.platform_utils": {"num_compute_units": lambda *_: 4},
    f"{GPU}.buffer_utils": {"UvaBackedTensor": Memory, "StagedWriteTensor": Memory},
}


class _Sources(MetaPathFinder, Loader):
    def __init__(self, root: Path) -> None:
        self.root = root

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] != "vllm":
            return None
        file = self.root / (name.replace(".", "/") + ".py")
        if name in REAL and file.exists():
            return importlib.util.spec_from_file_location(name, file)
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(_GIVEN.get(module.__name__, {}))


def load(root: Path) -> None:
    """Make `import vllm...` find vLLM's sources below `root`; once in a process."""
    if not (root / "vllm" / "v1" / "worker" / "gpu" / "sample" / "gumbel.py").exists():
        raise FileNotFoundError(f"{root} holds no sources of vLLM")
    sys.meta_path.insert(0, _Sources(root))
    hasten()
