"""Build a worker from the configuration: an engine that speculates, a learner, a drafter trainer.

This runs in the worker's own process if there are several.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from longtail.assembly.drafters import (
    LearnedDrafter,
    ModelFiles,
    Target,
    open_drafters,
    open_trainable,
    target_of,
)
from longtail.assembly.plan import RunPlan
from longtail.assembly.policy import open_policy
from longtail.assembly.vllm import open_vllm
from longtail.cluster.workers.components import Drafting, WorkerComponents
from longtail.cluster.workers.processes import Place
from longtail.cluster.workers.worker import Worker
from longtail.config.rl import RunConfig, SpotSection
from longtail.config.sections import OptimizerSection
from longtail.drafter.ridge.layer import RidgeLayer
from longtail.drafter.training.buffer import DrafterBuffer
from longtail.drafter.training.eagle import TrainerSettings
from longtail.drafter.training.spot import SpotSettings, SpotTrainer
from longtail.drafter.training.target_states import training_taps
from longtail.drafter.weights import DrafterWeights, copy_parameters
from longtail.engine.engine import RolloutEngine
from longtail.engine.request import EngineLimits
from longtail.engine.speculation.features import FeatureStore
from longtail.engine.speculation.speculator import Speculation
from longtail.generator import Generator
from longtail.model.hf.model import load_model
from longtail.model.hf.tokenizer import load_tokenizer
from longtail.model.policy import Policy
from longtail.rl.learner import Learner
from longtail.speculation.drafter import Drafter
from longtail.speculation.strategy import Strategy
from longtail.system.device import (
    DTYPES,
    is_multithreaded,
    multiplies_bfloat16,
    rollout_threads,
    set_threads,
    threads_each,
)
from longtail.tuner.budget import BudgetTuner
from longtail.tuner.tuner import FixedTuner, OffTuner, Tuner

SPOT_MICRO_TOKENS = 384
"""Tokens of a micro-batch of spot training; longer texts are cut to windows."""
_MATRIX_RATE = 0.005
"""Muon's rate for a trained drafter."""


def build_worker(
    plan: RunPlan, drafters: Sequence[str], limits: EngineLimits, place: Place
) -> Worker:
    """Build a worker in its own process; `drafters` are the names of `located`."""
    set_threads(threads_each(plan.config.run.threads, place.sharing))
    return Worker(build_components(plan, drafters, limits, place))


def build_components(
    plan: RunPlan, drafters: Sequence[str], limits: EngineLimits, place: Place
) -> WorkerComponents:
    """Build the components of a worker."""
    config, device, hidden_size = plan.config, plan.device, plan.shape.hidden_size
    directory = place.local(plan.directory)
    tokenizer = load_tokenizer(directory)
    home = "cpu" if config.is_sharded else device  # shards move to the device in the team
    policy = open_policy(directory, config, home)
    names = [str(place.local(Path(name))) for name in drafters]
    open_generator = open_vllm if plan.on_vllm else open_own
    files = ModelFiles(tokenizer=tokenizer, directory=directory, name=config.model.path)
    generator, learned = open_generator(plan, limits, names, files, policy)
    return WorkerComponents(
        generator=generator,
        learner=Learner(policy, config.learner, total_steps=config.run.steps),
        policy=policy,
        backend="nccl" if plan.gpus >= 1 else "gloo",  # NCCL admits a GPU once
        tokenizer=tokenizer,
        # Each worker has its own seed, or all would train the same replica.
        drafting=None
        if learned is None
        else make_drafting(config.spot, learned, seed=config.run.seed + place.worker),
        drafter=None if learned is None else learned.loaded,
        rollout_threads=rollout_threads(hidden_size),
        borrows=device.type == "cpu"
        and isinstance(generator, RolloutEngine)
        and is_multithreaded(hidden_size),
    )


def open_own(
    plan: RunPlan,
    limits: EngineLimits,
    names: Sequence[str],
    files: ModelFiles,
    _policy: Policy,
) -> tuple[Generator, LearnedDrafter | None]:
    """Open longtail's engine, with a model of its own in the precision of rollouts."""
    config = plan.config
    model = load_model(files.directory, DTYPES[config.rollout.dtype])
    target = target_of(files, model)
    speculation = _speculation(config, open_drafters(names, target))
    engine = RolloutEngine(model, target.tokenizer.decode, limits, speculation=speculation)
    learned = None if speculation is None else open_learned(names, target, speculation)
    return engine, learned


def open_learned(names: Sequence[str], target: Target, full: Speculation) -> LearnedDrafter | None:
    """Open the drafter that learns; None if none of `names` can."""
    if (loaded := open_trainable(names, target)) is None:
        return None
    return LearnedDrafter(loaded=loaded, target=target, texts=full.texts, features=full.features)


def make_drafting(own: SpotSection, learned: LearnedDrafter, *, seed: int) -> Drafting | None:
    """Build the trainer of a drafter; None if it does not learn."""
    loaded, target = learned.loaded, learned.target
    by_sums = isinstance(loaded.layer, RidgeLayer)
    if own.train == "never" or (by_sums and learned.texts is None):
        return None
    renewable_ids = loaded.draft_ids if loaded.head is None else None
    drafting = Drafting(
        served=DrafterWeights(
            version=0,
            tensors=copy_parameters(loaded.layer, renewable_ids),
            num_tokens=loaded.training.tokens,
        ),
        buffer=DrafterBuffer(own.buffer_mb * 2**20, seed=seed),
    )
    if learned.texts is not None:
        sums = learned.texts.take()
        sums = sums.restored(loaded.sums) if loaded.sums else sums
        return replace(drafting, texts=learned.texts, sums=sums)
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
            loaded.copied().eagle,
            target.model,
            settings,
            draft_ids=loaded.draft_ids,
            head=loaded.head,
            store=learned.features,
        ),
    )


def _speculation(config: RunConfig, drafters: tuple[Drafter, ...]) -> Speculation | None:
    own = config.speculation
    if not drafters:
        return None
    fixed = Strategy(depth=own.depth, width=own.width, size=own.size)
    tuners: dict[str, Callable[[], Tuner]] = {
        "budget": BudgetTuner,
        "fixed": lambda: FixedTuner(fixed, max_running=own.max_running),
        "off": OffTuner,
    }
    full = Speculation(drafters=drafters, tuner=tuners[own.tuner](), coupled=own.coupled)
    return learning(full, config.spot)


def learning(full: Speculation, own: SpotSection) -> Speculation:
    """Return speculation that keeps what its first drafter with weights learns from."""
    drafter = full.learner
    if own.train == "never" or drafter is None:
        return full
    if (statistics := drafter.statistics()) is not None:
        return replace(full, texts=statistics)
    if not own.features_mb:
        return full
    store = FeatureStore(training_taps(drafter.taps), own.features_mb * 2**20)
    return replace(full, features=store)
