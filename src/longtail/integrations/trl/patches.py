"""Checks TRL's version; replaces its generation class and log methods for a while.

trl.trainer.grpo_trainer.VLLMGeneration    the class that the trainers generate with
trl.trainer.rloo_trainer.VLLMGeneration
GRPOTrainer.log, RLOOTrainer.log           they add the metrics of the rollouts first
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module, metadata
from typing import Any, final
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from longtail.errors import ConfigError
from longtail.system import machine

WORKING = "trl>=1.11,<=1.16"
"""Versions that were run with this module."""
_GENERATION = "trl.generation.vllm_generation"
_TRAINERS = {
    "trl.trainer.grpo_trainer": "GRPOTrainer",
    "trl.trainer.rloo_trainer": "RLOOTrainer",
}
_GENERATION_CLASS = "VLLMGeneration"
_SIGNATURES: Mapping[str, tuple[str, ...]] = {
    "VLLMGeneration.generate": ("self", "prompts", "images", "num_generations", "profiler"),
    "VLLMGeneration.sync_weights": ("self",),
    "VLLMGeneration._init_vllm": ("self",),
    "VLLMGeneration._iter_named_params": ("self",),
    "GRPOTrainer.log": ("self", "logs", "start_time"),
    "RLOOTrainer.log": ("self", "logs", "start_time"),
}
_SETTINGS = frozenset(
    {
        "model", "accelerator", "processing_class", "mode", "structured_outputs_regex",
        "tensor_parallel_size", "max_model_length", "max_num_seqs", "enable_sleep_mode",
        "repetition_penalty", "temperature", "top_p", "top_k", "min_p", "max_completion_length",
        "generation_kwargs",
    }
)  # fmt: skip
"""Arguments of VLLMGeneration that are read."""


def require_trl() -> None:
    """Raise ConfigError if TRL is missing, or differs from what this package was written for."""
    try:
        version = metadata.version("trl")
        check(version, members())
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"longtail.integrations.trl needs TRL ({error}); use {WORKING}: "
            f"{machine.pip_install('trl')}"
        ) from error


def members() -> dict[str, Callable[..., Any]]:
    """Return the functions of the installed TRL that are overridden or called, by name."""
    generation = getattr(import_module(_GENERATION), _GENERATION_CLASS)
    classes = {name: getattr(import_module(where), name) for where, name in _TRAINERS.items()}
    for where in _TRAINERS:
        getattr(import_module(where), _GENERATION_CLASS)  # the name that is replaced
    classes[_GENERATION_CLASS] = generation
    found = {name: getattr(classes[name.split(".")[0]], name.split(".")[1]) for name in _SIGNATURES}
    return {**found, "VLLMGeneration.__init__": generation.__init__}


def check(version: str, functions: Mapping[str, Callable[..., Any]]) -> None:
    """Raise ConfigError for the first function whose parameters differ."""
    for name, expected in _SIGNATURES.items():
        found = tuple(inspect.signature(functions[name]).parameters)
        if found != expected:
            raise ConfigError(
                f"trl {version}: {name} takes ({', '.join(found)}), and longtail needs "
                f"({', '.join(expected)}); use {WORKING}"
            )
    settings = inspect.signature(functions["VLLMGeneration.__init__"]).parameters
    if missing := _SETTINGS - set(settings):
        raise ConfigError(
            f"trl {version}: VLLMGeneration has no setting {min(missing)}; use {WORKING}"
        )


@contextmanager
def patched(make: Callable[..., Any], before_log: Callable[[Any], None]) -> Iterator[None]:
    """Replace TRL's generation class by `make` inside the context.

    `before_log` is called with the trainer before each of its logs.
    """
    with ExitStack() as stack:
        for where, name in _TRAINERS.items():
            module = import_module(where)
            stack.enter_context(mock.patch.object(module, _GENERATION_CLASS, make))
            trainer = getattr(module, name)
            stack.enter_context(
                mock.patch.object(trainer, "log", _logging(trainer.log, before_log))
            )
        yield


def _logging(original: Callable[..., Any], before_log: Callable[[Any], None]) -> Any:
    @functools.wraps(original)
    def log(trainer: Any, *args: Any, **named: Any) -> Any:
        before_log(trainer)
        return original(trainer, *args, **named)

    return log


@final
class Ranks:
    """This process among all of the job; alone it needs no process group."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size = rank, size
        self._device = device

    def sums(self, numbers: Sequence[float]) -> list[float]:
        """Add up numbers over all processes, which all call this."""
        found = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        if self.size > 1:
            dist.all_reduce(found)
        return [float(number) for number in found]

    def broadcast(self, tensors: Mapping[str, Tensor], source: int) -> dict[str, Tensor]:
        """Return the tensors of the process `source`; the others give tensors of their shapes."""
        if self.size == 1:
            return dict(tensors)
        received = {}
        for name in sorted(tensors):
            moved = tensors[name].detach().to(self._device).contiguous()
            moved = moved if self.rank == source else torch.empty_like(moved)
            dist.broadcast(moved, source)
            received[name] = moved.to(tensors[name].device)
        return received
