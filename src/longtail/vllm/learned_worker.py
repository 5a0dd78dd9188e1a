"""Hooks of the learned drafter in a vLLM worker: start, new weights of the target, saving.

load_model                                                      the drafter reads the target's parts
load_weights, finish_weight_update, add_lora                    earlier texts count less
a step of new requests alone, or after a pause                  the same if weights differ
collective_rpc("longtail_save_drafter", args=(DIRECTORY,))      a drafter directory

Its memory is taken after that of the weights, outside of vLLM's pool: sleep leaves it alone.
"""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from longtail.drafter.formats.checkpoint import (
    LoadedDrafter,
    TargetIdentity,
    TrainingRecord,
    load_unbound,
    tokenizer_digest,
)
from longtail.drafter.kind import LEARNED
from longtail.drafter.ridge.layer import RidgeConfig, RidgeLayer
from longtail.drafter.weights import DRAFT_IDS, load_parameters
from longtail.errors import ConfigError, UnsupportedModelError
from longtail.model.hf.model import load_config
from longtail.model.hf.tokenizer import load_tokenizer
from longtail.model.sources.hub import resolve
from longtail.vllm.history import SequenceTable
from longtail.vllm.learned import Draw, Learned
from longtail.vllm.patching import Patch, around, learning, module_of
from longtail.vllm.ridge import Block, Parts

logger = logging.getLogger("vllm.plugins.longtail")

METHOD = "longtail_save_drafter"


def patches() -> list[Patch]:
    """Return the replacements in a worker of either model runner."""
    holder = module_of("vllm.v1.worker.gpu_worker", "Worker")
    by_worker = partial(_renew, learned_of)
    return [
        Patch.of(holder, "load_model", "self", _load_model, "load_dummy_weights"),
        Patch.of(holder, "execute_model", "self scheduler_output", _execute_model),
        Patch.of(holder, "finish_weight_update", "self", by_worker),
        Patch.of(holder, "add_lora", "self lora_request", by_worker),
        Patch(holder, METHOD, save_drafter),
    ]


def open_learned(model: Any, config: Any, draw: Draw) -> Learned:
    """Return the drafter of a model that vLLM has loaded; ConfigError if it can have none."""
    settings = learning(config)
    assert settings is not None, "else vLLM has made another drafter"
    parts = Parts.of(model, config)
    running, length = config.scheduler_config.max_num_seqs, config.model_config.max_model_len
    block = Block(parts, config.speculative_config.num_speculative_tokens, running)
    if settings.begin is not None:
        begin_from(block, Path(settings.begin))
    logger.info(
        "longtail: vLLM learns its own drafter, chains of up to %d, sums of %d MB",
        block.depth, block.sums.products.nbytes >> 20,
    )  # fmt: skip
    learned = Learned(block, SequenceTable(running, length, parts.device), draw)
    learned.look(model)
    # Weights that are loaded while requests run, as by prime-rl, are followed at once.
    model.load_weights = around(model.load_weights, partial(_renew, lambda *_: learned))
    return learned


def learned_of(worker: Any) -> Learned | None:
    """Return the learned drafter of a worker; None in other ranks and engines."""
    return getattr(worker, "longtail_learned", None)


def _load_model(stock: Callable[..., None], self: Any, *args: Any, **options: Any) -> None:
    """Load the target; a learned drafter reads its parts."""
    stock(self, *args, **options)
    runner = self.model_runner
    drafter: Any = getattr(runner, "drafter", None) or getattr(runner, "speculator", None)
    if hasattr(drafter, "learned"):
        model = runner.get_model()  # runner.model may be a graph of it
        drafter.learned = open_learned(model, self.vllm_config, drafter.draw)
        self.longtail_learned = drafter.learned


def _execute_model(stock: Callable[..., Any], self: Any, scheduler_output: Any) -> Any:
    """Run a step; a learned drafter looks at weights before one of new requests alone.

    Or after a pause: trainers also copy and merge weights in place, with or without requests.
    """
    learned = learned_of(self)
    num_requests = len(scheduler_output.num_scheduled_tokens)
    may_differ = num_requests == len(scheduler_output.scheduled_new_reqs)
    may_differ |= getattr(scheduler_output, "longtail_has_paused", False)
    if learned is not None and num_requests and (may_differ or learned.has_changed):
        learned.look(self.model_runner.get_model())
    return stock(self, scheduler_output)


def _renew(
    find: Callable[..., Learned | None], stock: Callable[..., Any], *args: Any, **options: Any
) -> Any:
    """Take new weights of the target, by position or name; a learned drafter follows."""
    result = stock(*args, **options)
    if (learned := find(*args[:1])) is not None:
        learned.has_changed = True
    return result


def save_if_learned(worker: Any, directory: str) -> None:
    """Write the learned drafter once it has learned something, of a model that longtail knows."""
    learned = learned_of(worker)
    if learned is not None and learned.block.is_ready:
        try:
            save_drafter(worker, directory)
        except ConfigError as error:
            logger.warning("longtail: %s", error)


def save_drafter(worker: Any, directory: str) -> str | None:
    """Write the learned drafter and its sums; return the directory, None in ranks without one.

    Raises ConfigError if there is nothing to save, or the model is of no family of longtail's.
    """
    learned = learned_of(worker)
    if learned is None or getattr(worker, "rank", 0) % worker.parallel_config.tensor_parallel_size:
        return None
    block = learned.block
    if not block.is_ready:
        raise ConfigError(f"{METHOD}: nothing has been learned yet; generate some texts first")
    model = worker.vllm_config.model_config.model
    try:
        files = resolve(model, METHOD, logger.info)
        target, tokenizer = load_config(files), load_tokenizer(files)
    except UnsupportedModelError as error:
        raise ConfigError(
            f"{METHOD}: a drafter directory describes a model of longtail's decoder: {error}"
        ) from error
    tensors = block.tensors()
    ids = tensors.pop(DRAFT_IDS).cpu()
    layer = RidgeLayer(RidgeConfig(target=target, slots=block.depth, draft_vocab_size=len(ids)))
    load_parameters(layer, {name: each.float().cpu() for name, each in tensors.items()})
    LoadedDrafter(
        layer=layer,
        draft_ids=ids,
        trained_on=TargetIdentity(name=model, tokenizer=tokenizer_digest(tokenizer), weights=""),
        training=TrainingRecord(
            steps=block.num_solved, tokens=int(block.sums.num_tokens), unroll_steps=0
        ),
        sums=block.sums.tensors(),
    ).save(Path(directory))
    return directory


def begin_from(block: Block, directory: Path) -> None:
    """Begin with a saved ridge drafter; ConfigError if it is of another model or kind."""
    loaded = load_unbound(directory)
    layer = loaded.layer
    if (depth := layer.config.max_depth) is None or loaded.kind.vllm != LEARNED:
        raise ConfigError(
            f"drafter {directory}: it is {layer.config.recipe}, and a learned drafter is ridge; "
            "give it as speculative_config"
        )
    target, parts = layer.config.target, block.parts
    for name in ("hidden_size", "vocab_size"):
        if (found := getattr(target, name)) != (own := getattr(parts, name)):
            raise ConfigError(
                f"drafter {directory}: it was trained on {loaded.trained_on.name}, whose {name} is "
                f"{found}; this model's is {own}"
            )
    if depth < block.depth:
        raise ConfigError(
            f"drafter {directory}: it drafts {depth} tokens; set "
            f"additional_config.longtail.depth to that, not {block.depth}"
        )
    ids = loaded.draft_ids
    weights = {name: each.detach() for name, each in layer.named_parameters()}
    block.take(weights | {DRAFT_IDS: torch.arange(target.vocab_size) if ids is None else ids})
    block.resume(loaded.sums)
