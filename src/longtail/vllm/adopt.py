"""New drafter weights in a running vLLM, between two steps.

    adopt_drafter(llm, "runs/first/drafter")            vllm.LLM
    await adopt_drafter_async(engine, "better")         AsyncLLM
    POST /collective_rpc {"method": "longtail_adopt_drafter", "args": ["better"]}     the server

Texts do not change: the drafter decides only which drafts are verified. Each worker reads and
checks the files itself, so the path must be readable there. Modules that the drafter shares with
the target are out of reach while the weights are loaded. Requests may be running; their drafts read
keys and values of the old drafter until these have left its window.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from longtail.errors import ConfigError
from longtail.vllm import cpu_fixes
from longtail.vllm.guards import Patch, check, class_of, module_of
from longtail.vllm.weights import read_weights

_RELOAD = "vllm.model_executor.model_loader.reload.layerwise"
METHOD = "longtail_adopt_drafter"
"""Method that every worker has, for `collective_rpc`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adoption:
    """A drafter that all workers have adopted."""

    digest: str
    """SHA-256 of the tensors."""
    seconds: float
    """Time that the slowest worker took, reading included."""
    version: int | None
    """Version of a run's publisher; None for other directories."""
    source: str


def patches() -> list[Patch]:
    """Return the new method of every worker; ConfigError if this vLLM cannot reload weights."""
    _reloading()
    worker = class_of("vllm.v1.worker.worker_base", "WorkerBase")
    check(worker, "get_model", "self")
    return [Patch(owner=worker, name=METHOD, replacement=adopt)]


def _reloading() -> tuple[Callable[..., None], Callable[..., None]]:
    """Return vLLM's functions before and after weights are loaded into a packed model."""
    module = module_of(_RELOAD)
    return (
        check(module, "initialize_layerwise_reload", "model"),
        check(module, "finalize_layerwise_processing", "model model_config"),
    )


def adopt_drafter(llm: Any, path: Path | str) -> Adoption:
    """Give a `vllm.LLM` new drafter weights.

    Raises ConfigError, before anything is changed, if they do not fit the drafter of the engine.
    """
    return _slowest(llm.collective_rpc(METHOD, args=(str(path),)))


async def adopt_drafter_async(engine: Any, path: Path | str) -> Adoption:
    """Give an `AsyncLLM` new drafter weights, as `adopt_drafter`."""
    return _slowest(await engine.collective_rpc(METHOD, args=(str(path),)))


def _slowest(answers: Sequence[Mapping[str, Any]]) -> Adoption:
    return Adoption(**max(answers, key=lambda each: each["seconds"]))


# ---- in the worker


def adopt(worker: Any, path: str) -> dict[str, Any]:
    """Read, check and load new weights; return an `Adoption` as a dictionary."""
    started = time.perf_counter()
    speculation = worker.vllm_config.speculative_config
    if speculation is None or worker.model_runner.get_draft_model() is None:
        raise ConfigError(
            "this vLLM has no drafter whose weights could be replaced: start it with a "
            "speculative_config that names one"
        )
    found = read_weights(
        Path(path),
        Path(speculation.draft_model_config.model),
        Path(worker.vllm_config.model_config.model),
    )
    load_drafter(worker, found.tensors)
    seconds = time.perf_counter() - started
    return {"digest": found.digest, "seconds": seconds, "version": found.version, "source": path}


def load_drafter(worker: Any, tensors: Mapping[str, Tensor]) -> None:
    """Load weights of the drafter, by the names of vLLM's files; their shapes are the old ones'.

    vLLM has packed the old ones already. Modules that belong to the target keep their weights.
    """
    from vllm.config import set_current_vllm_config

    begin, finish = _reloading()
    config, runner = worker.vllm_config, worker.model_runner
    model: Any = runner.get_draft_model()
    with (
        set_current_vllm_config(config),
        torch.no_grad(),
        _without_shared(model, runner.get_model()) as absent,
    ):
        begin(model)
        try:
            model.load_weights(
                (name, tensor)
                for name, tensor in tensors.items()
                if not name.startswith(tuple(f"{each}." for each in absent))
            )
        finally:
            finish(model, config.speculative_config.draft_model_config)


def load_policy(worker: Any, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Load all weights of the target, by the names of vLLM's files, in place."""
    runner = worker.model_runner
    reload = check(runner, "reload_weights", "weights_iterator weights_path is_checkpoint_format")
    model = runner.get_model()
    with torch.no_grad(), _noting_layers_left_out() as named:
        reload(weights_iterator=tensors)
        if cpu_fixes.is_cpu():
            cpu_fixes.repack_heads(model)
    kinds = {type(each).__name__ for each in model.modules() if list(each.parameters(False))}
    if left_out := named & kinds:
        raise ConfigError(
            f"vLLM cannot take new weights of this model while it runs (its {min(left_out)} keeps "
            "the old ones): such a model cannot be trained with rollout.engine = 'vllm'"
        )


@contextmanager
def _noting_layers_left_out() -> Iterator[set[str]]:
    """Yield the classes of layers that a reload leaves as they were, of which vLLM only warns.

    Layers with buffers alone are among them. A head that is tied to the embedding is not.
    """
    found: set[str] = set()

    class Noting(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            name, separator, _ = record.getMessage().partition(": Failed to load weights")
            found.update({name} - {"ParallelLMHead"} if separator else ())
            return not separator

    logger, noting = logging.getLogger(_RELOAD), Noting()
    level = logger.level
    logger.addFilter(noting)
    logger.setLevel(logging.WARNING)
    try:
        yield found
    finally:
        logger.setLevel(level)
        logger.removeFilter(noting)


@contextmanager
def _without_shared(model: nn.Module, target: nn.Module) -> Iterator[list[str]]:
    """Take the target's modules out of a drafter for a while; yield their last names."""
    theirs = set(target.modules())
    taken: list[tuple[nn.Module, str, nn.Module]] = []
    for parent in list(model.modules()):
        if parent in theirs:
            continue
        for name, child in list(parent.named_children()):
            if child in theirs:
                taken.append((parent, name, child))
                setattr(parent, name, nn.Identity())
    try:
        yield [name for _, name, _ in taken]
    finally:
        for parent, name, child in taken:
            setattr(parent, name, child)
