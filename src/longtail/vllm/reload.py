"""New weights for the models of a running vLLM, loaded in place by each of its workers.

    load_policy     all of the target; a layer that keeps its old weights is an error
    load_drafter    the drafter's own; its keys and values of earlier tokens stay the old one's

`VllmGenerator` calls them by `collective_rpc`. The tensors have the names of vLLM's files.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from longtail.errors import ConfigError
from longtail.vllm import cpu_fixes
from longtail.vllm.patching import RELOAD, check, reloading


@torch.no_grad()
def load_drafter(worker: Any, tensors: Mapping[str, Tensor]) -> None:
    """Load weights of the drafter, of the old ones' shapes; modules of the target keep theirs."""
    from vllm.config import set_current_vllm_config

    begin, finish = reloading()
    config, runner = worker.vllm_config, worker.model_runner
    has_one = hasattr(runner, "get_draft_model")  # since vLLM 0.26
    model: Any = runner.get_draft_model() if has_one else runner.drafter.model
    with set_current_vllm_config(config), _without_shared(model, runner.get_model()) as absent:
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
    """Load all weights of the target. Raises ConfigError if a layer would keep its old ones."""
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

    def note(record: logging.LogRecord) -> bool:
        name, separator, _ = record.getMessage().partition(": Failed to load weights")
        found.update({name} - {"ParallelLMHead"} if separator else ())
        return not separator

    logger = logging.getLogger(RELOAD)
    level = logger.level
    logger.addFilter(note)
    logger.setLevel(logging.WARNING)
    try:
        yield found
    finally:
        logger.setLevel(level)
        logger.removeFilter(note)


@contextmanager
def _without_shared(model: nn.Module, target: nn.Module) -> Iterator[list[str]]:
    """Take the target's modules out of a drafter for a while; yield their last names."""
    theirs = set(target.modules())
    taken = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if child in theirs and parent not in theirs
    ]
    for parent, name, _ in taken:
        setattr(parent, name, nn.Identity())
    try:
        yield [name for _, name, _ in taken]
    finally:
        for parent, name, child in taken:
            setattr(parent, name, child)
