"""Build a worker from the configuration: an engine that speculates, a learner, a drafter trainer.

This runs in the worker's own process if there are several.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from longtail.assembly import memory
from longtail.assembly.drafters import FRESH, Target, drafter_names, open_drafters, open_trainable
from longtail.assembly.policy import open_policy
from longtail.cluster.worker import Drafting, Worker, WorkerComponents
from longtail.config.rl import RunConfig, SpotSection
from longtail.config.sections import OptimizerSection
from longtail.drafter.formats.checkpoint import LoadedDrafter
from longtail.drafter.training.buffer import DrafterBuffer
from longtail.drafter.training.reader import training_taps
from longtail.drafter.training.spot import SpotSettings, SpotTrainer
from longtail.drafter.training.trainer import TrainerSettings
from longtail.drafter.weights import DrafterWeights, copy_parameters
from longtail.engine.engine import RolloutEngine
from longtail.engine.request import EngineLimits
from longtail.engine.speculation.features import FeatureStore
from longtail.engine.speculation.speculator import Speculation
from longtail.model.hf.model import load_model
from longtail.model.hf.tokenizer import load_tokenizer
from longtail.rl.learner import Learner
from longtail.speculation.drafter import Drafter
from longtail.speculation.grow import GrowingDrafter
from longtail.speculation.strategy import Strategy
from longtail.system.device import (
    DTYPES,
    choose_device,
    multiplies_bfloat16,
    rollout_threads,
    set_threads,
    threads_each,
    to_stderr,
)
from longtail.tuner.bandit import BanditTuner
from longtail.tuner.budget import BudgetTuner
from longtail.tuner.tuner import FixedTuner, OffTuner, Tuner

SPOT_MICRO_TOKENS = 384
"""Tokens of a micro-batch of spot training; longer texts are cut to windows."""
_MATRIX_RATE = 0.005
"""Muon's rate for a trained drafter."""


def build_worker(config: RunConfig, directory: Path, limits: EngineLimits, number: int) -> Worker:
    """Build worker `number` in its own process."""
    set_threads(threads_each(config.run.threads, config.cluster.workers))
    return Worker(build_components(config, directory, limits, number=number))


def build_components(
    config: RunConfig,
    directory: Path,
    limits: EngineLimits,
    log: Callable[[str], None] = to_stderr,
    *,
    number: int = 0,
) -> WorkerComponents:
    """Build the components of a worker."""
    device, tokenizer = choose_device(config.run.device), load_tokenizer(directory)
    home = "cpu" if config.is_sharded else device  # shards move to the device in the team
    policy = open_policy(directory, config, home)
    rollout_model = load_model(directory, DTYPES[config.rollout.dtype], device)
    rollout_model.batch_invariant = config.rollout.batch_invariant
    target = Target(
        model=rollout_model, tokenizer=tokenizer, directory=directory, name=config.model.path
    )
    if device.type == "cuda":  # the KV cache takes the free memory, less what learning needs later
        made_later = memory.made_later(config, rollout_model.config)
        limits = replace(limits, reserved_bytes=made_later)
    learns = config.spot.train != "never"
    names = drafter_names(config.speculation.drafter, target.name, learns=learns)
    speculation = _speculation(config, open_drafters(names, target, log))
    trainable = partial(open_trainable, names, target, log)
    engine = RolloutEngine(rollout_model, tokenizer.decode, limits, speculation=speculation)
    if speculation is not None and FRESH in names:
        engine.speculate(without_fresh(speculation, names))
    return WorkerComponents(
        engine=engine,
        learner=Learner(policy, config.learner, total_steps=config.run.steps),
        policy=policy,
        device=device,
        tokenizer=tokenizer,
        # Each worker has its own seed, or all would train the same replica.
        drafting=make_drafting(
            config.spot,
            target,
            speculation,
            trainable,
            seed=config.run.seed + number,
        ),
        read_drafter=trainable,
        rollout_threads=rollout_threads(rollout_model.config.hidden_size),
    )


def make_drafting(
    own: SpotSection,
    target: Target,
    speculation: Speculation | None,
    trainable: Callable[[], LoadedDrafter | None],
    *,
    seed: int,
) -> Drafting | None:
    """Build the trainer of the first drafter that can be trained; None without one."""
    if speculation is None or own.train == "never":
        return None
    drafter, loaded = _learner(speculation.drafters), trainable()
    if drafter is None or loaded is None:
        return None
    renewable_ids = loaded.draft_ids if loaded.head is None else None
    drafting = Drafting(
        drafter=drafter,
        speculation=speculation,
        served=DrafterWeights(
            version=0,
            tensors=copy_parameters(loaded.layer, renewable_ids),
            num_tokens=loaded.training.tokens,
        ),
        buffer=DrafterBuffer(own.buffer_mb * 2**20, seed=seed),
    )
    if speculation.texts is not None:
        sums = speculation.texts.take()
        sums = sums.restored(loaded.sums) if loaded.sums else sums
        return replace(drafting, texts=speculation.texts, sums=sums)
    settings = SpotSettings(
        trainer=TrainerSettings(
            unroll_steps=loaded.training.unroll_steps,
            optimizer=OptimizerSection(learning_rate=own.learning_rate),
            matrix_rate=_MATRIX_RATE if own.matrix_rate is None else own.matrix_rate or None,
            autocast=target.model.dtype == torch.bfloat16
            and multiplies_bfloat16(target.model.device),
        ),
        batch_tokens=own.batch_tokens,
        tokens_per_micro_batch=min(SPOT_MICRO_TOKENS, own.batch_tokens),
    )
    return replace(
        drafting,
        trainer=SpotTrainer(
            loaded.eagle,
            target.model,
            settings,
            draft_ids=loaded.draft_ids,
            head=loaded.head,
            store=speculation.features,
        ),
    )


def _speculation(config: RunConfig, drafters: tuple[Drafter, ...]) -> Speculation | None:
    own, seed = config.speculation, config.run.seed
    if not drafters:
        return None
    fixed = Strategy(depth=own.depth, width=own.width, size=own.size)
    tuners: dict[str, Callable[[], Tuner]] = {
        "budget": BudgetTuner,
        "beg-mab": lambda: BanditTuner(seed=seed),
        "fixed": lambda: FixedTuner(fixed, max_running=own.max_running),
        "off": OffTuner,
    }
    full = Speculation(drafters=drafters, tuner=tuners[own.tuner](), coupled=own.coupled)
    return learning(full, config.spot)


def without_fresh(full: Speculation, names: Sequence[str]) -> Speculation:
    """Return the speculation before a fresh drafter has learned anything."""
    pairs = zip(names, full.drafters, strict=True)
    others = tuple(drafter for name, drafter in pairs if name != FRESH)
    return replace(full, drafters=others, tuner=full.tuner if others else OffTuner())


def learning(full: Speculation, own: SpotSection) -> Speculation:
    """Return speculation that keeps what its first drafter with weights learns from."""
    drafter = _learner(full.drafters)
    if own.train == "never" or drafter is None:
        return full
    if (statistics := drafter.statistics()) is not None:
        return replace(full, texts=statistics)
    if not own.features_mb:
        return full
    store = FeatureStore(training_taps(drafter.taps), own.features_mb * 2**20)
    return replace(full, features=store)


def _learner(drafters: Sequence[Drafter]) -> GrowingDrafter | None:
    """Return the first drafter that has weights."""
    return next((each for each in drafters if isinstance(each, GrowingDrafter)), None)
