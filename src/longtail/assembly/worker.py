"""Build a worker from the plan of its run: policy, generator, learner, and how its drafter learns.

This runs in the worker's own process if there are several.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from longtail.assembly.drafters import Target, open_speculation, open_trainable
from longtail.assembly.plan import RunPlan
from longtail.assembly.vllm import open_vllm
from longtail.cluster.workers.components import Drafting, WorkerComponents
from longtail.cluster.workers.episodes import EpisodeGenerator
from longtail.cluster.workers.processes import Place
from longtail.cluster.workers.worker import Worker
from longtail.config.rl import SpotSection
from longtail.config.sections import OptimizerSection
from longtail.drafter.eagle.trainer import TrainerSettings
from longtail.drafter.formats.checkpoint import LoadedDrafter
from longtail.drafter.training.buffer import DrafterBuffer
from longtail.drafter.training.spot import SpotSettings, SpotTrainer
from longtail.drafter.weights import DrafterWeights, copy_parameters
from longtail.engine.engine import RolloutEngine
from longtail.engine.request import EngineLimits
from longtail.engine.speculation.speculator import Speculation
from longtail.errors import ConfigError
from longtail.generator import Generator
from longtail.model.hf.model import load_model
from longtail.model.hf.tokenizer import Tokenizer, load_tokenizer
from longtail.model.hf.turns import Turns
from longtail.model.transformer import Transformer
from longtail.rl.data.prompts import Encoder
from longtail.rl.environments.calls import format_of
from longtail.rl.environments.pool import open_environments
from longtail.rl.learner import Learner
from longtail.rl.policy import open_policy
from longtail.run.base_model import check_base
from longtail.system.device import (
    DTYPES,
    multiplies_bfloat16,
    rollout_threads,
    set_threads,
    threads_each,
)

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
    sys.path += [each for each in plan.modules if each not in sys.path]
    plan = replace(plan, directory=place.local(plan.directory))
    if plan.base is not None and config.cluster.workers > 1:
        check_base(config, plan.base, plan.directory)
    names = [str(place.local(Path(name))) for name in drafters]
    tokenizer = load_tokenizer(plan.directory)
    home = "cpu" if config.is_sharded else device  # shards move to the device in the team
    policy = open_policy(plan.directory, config, home)
    if plan.on_vllm:
        generator, drafter = open_vllm(plan, limits, names, tokenizer, policy)
    else:
        generator, drafter = open_own(plan, limits, names, tokenizer)
    own = generator if isinstance(generator, RolloutEngine) else None
    drafting = None
    if drafter is not None and config.spot.train != "never":
        target, speculation = (own.model, own.speculation) if own else (policy, None)
        assert isinstance(target, Transformer), "drafters with weights are of our decoder"
        # Each worker has its own seed, or all would train the same replica.
        seed = config.run.seed + place.worker
        drafting = make_drafting(config.spot, drafter, target, speculation, seed=seed)
    return WorkerComponents(
        generator=_in_episodes(plan, generator, limits, tokenizer),
        learner=Learner(policy, config.learner, total_steps=config.run.steps),
        policy=policy,
        backend="nccl" if plan.gpus >= 1 else "gloo",  # NCCL admits a GPU once
        tokenizer=tokenizer,
        drafting=drafting,
        drafter=drafter,
        rollout_threads=rollout_threads(hidden_size),
    )


def _in_episodes(
    plan: RunPlan, generator: Generator, limits: EngineLimits, tokenizer: Tokenizer
) -> Generator:
    """Return the generator as it is, or around it one whose completions are episodes."""
    own, rollout = plan.config.environment, plan.config.rollout
    if not own.is_on:
        return generator
    calls, problem = "", None
    try:
        calls = format_of(tokenizer.template.source or "")
    except ConfigError as error:  # which only tools need
        problem = error
    environments = open_environments(own, calls, most=rollout.max_running)
    tools = environments.first("tools")
    if problem is not None and tools:
        raise problem
    encoder = Encoder.of(tokenizer, plan.config.data, plan.now)
    turns = Turns(tokenizer, encoder.render, tools)
    turns.check(("tool",) if tools else ("user",))
    return EpisodeGenerator(
        generator, environments, turns, tokenizer.decode, own, max_len=limits.max_len
    )


def open_own(
    plan: RunPlan, limits: EngineLimits, names: Sequence[str], tokenizer: Tokenizer
) -> tuple[RolloutEngine, LoadedDrafter | None]:
    """Open longtail's engine, with a model of its own in the precision of rollouts.

    Returns its drafter with weights, too, if there is one.
    """
    config = plan.config
    model = load_model(plan.directory, DTYPES[config.rollout.dtype])
    target = Target(
        model=model, tokenizer=tokenizer, directory=plan.directory, name=config.model.path
    )
    speculation = open_speculation(names, target, config.speculation, config.spot)
    engine = RolloutEngine(model, tokenizer.decode, limits, speculation=speculation)
    return engine, open_trainable(names, target)


def make_drafting(
    own: SpotSection,
    drafter: LoadedDrafter,
    target: Transformer,
    speculation: Speculation | None,
    *,
    seed: int,
) -> Drafting:
    """Return how a drafter learns: from what `speculation` adds up, or by gradient.

    `target` has the states that it reads when it is trained by gradient.
    """
    changing_ids = None if drafter.kind.sums is None else drafter.draft_ids
    drafting = Drafting(
        served=DrafterWeights(
            version=0,
            tensors=copy_parameters(drafter.layer, changing_ids),
            num_tokens=drafter.training.tokens,
            vocab_size=target.config.vocab_size,
        ),
        buffer=DrafterBuffer(own.buffer_mb * 2**20, seed=seed),
    )
    if speculation is not None and (statistics := speculation.statistics) is not None:
        sums = statistics.take()
        sums = sums.restored(drafter.sums) if drafter.sums else sums
        return replace(drafting, statistics=statistics, sums=sums)
    settings = SpotSettings(
        trainer=TrainerSettings(
            unroll_steps=drafter.training.unroll_steps,
            optimizer=OptimizerSection(learning_rate=own.learning_rate),
            matrix_rate=_MATRIX_RATE if own.matrix_rate is None else own.matrix_rate or None,
            autocast=target.dtype == torch.bfloat16 and multiplies_bfloat16(target.device),
        ),
        batch_tokens=own.batch_tokens,
        tokens_per_micro_batch=min(SPOT_MICRO_TOKENS, own.batch_tokens),
    )
    return replace(
        drafting,
        trainer=SpotTrainer(
            drafter.copied().eagle,
            target,
            settings,
            draft_ids=drafter.draft_ids,
            head=drafter.head,
            store=None if speculation is None else speculation.features,
        ),
    )
