"""Construction of a training run from its configuration; everything is checked before it starts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from longtail.assembly import memory, precision
from longtail.assembly.device import run_device, worker_gpus
from longtail.assembly.drafters import drafter_names, located
from longtail.assembly.engine import model_directory
from longtail.assembly.policy import check_policy, shape_of
from longtail.assembly.prompts import load_prompts
from longtail.assembly.vllm import uses_vllm
from longtail.assembly.worker import build_worker
from longtail.cluster.group import WorkerGroup
from longtail.cluster.records import Progress
from longtail.cluster.workers.pool import LocalWorkerPool, Place, WorkerPool
from longtail.cluster.workers.worker import Worker
from longtail.config.rl import RunConfig
from longtail.engine.request import EngineLimits
from longtail.errors import ConfigError
from longtail.model.hf.tokenizer import Tokenizer, check_vocabulary, load_tokenizer
from longtail.model.transformer import ModelConfig
from longtail.rl.data.prompts import PromptSource
from longtail.rl.grading.pool import Check
from longtail.rl.streaming import why_not
from longtail.system import machine
from longtail.system.device import set_threads, threads_each, to_stderr
from longtail.types import Prompt, SamplingParams

_SHARDING_SINCE = "2.13"
"""First version of PyTorch with `FSDPModule.reset_iter_state`, for models without gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerComponents:
    """Components of the training loop."""

    source: PromptSource
    heldout: tuple[Prompt, ...]
    workers: WorkerGroup
    sampling: SamplingParams
    limits: EngineLimits
    """Limits of every worker's engine."""
    num_dropped: int
    """Number of prompts left out because they exceed data.max_prompt_len."""
    num_ungradable: int
    """Number of prompts left out because the reward cannot grade their answers."""

    def start_lines(self, config: RunConfig, threads: int, last_step: int | None) -> list[str]:
        """Return what a run logs at its start: model, directory, precision, prompts left out."""
        resumed = "" if last_step is None else f", resumed after step {last_step}"
        lines = [
            f"{config.model.path}: {self.workers.num_parameters:,} parameters, "
            f"{config.learner.loss}, {config.cluster.workers} x {threads} threads, run directory "
            f"{Path(config.run.dir)}{resumed}"
        ]
        lines += (*precision.costs(config), *precision.inexactness(config))
        if self.num_dropped:
            lines.append(
                f"{self.num_dropped} prompts over {config.data.max_prompt_len} tokens are left out "
                "(data.drop_long_prompts)"
            )
        if self.num_ungradable:
            lines.append(f"{self.num_ungradable} prompts are left out (data.drop_ungradable)")
        return lines


def assemble(
    config: RunConfig,
    directory: Path,
    check: Check,
    log: Callable[[str], None] = to_stderr,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> TrainerComponents:
    """Build all components from the model in `directory`.

    `check` finds the rows that the reward cannot grade: they are refused, or left out if so
    configured. `on_progress` is called during rollouts and may raise. Raises ConfigError if
    configuration, model and data do not fit together.
    """
    _check(config, directory)
    shape, tokenizer = shape_of(directory), load_tokenizer(directory)
    memory.check(config, shape, run_device(config))
    check_vocabulary(tokenizer, shape)
    prompts = load_prompts(config, tokenizer, check)
    longest = max(
        len(prompt.tokens) for prompt in (*prompts.train.prompts, *prompts.heldout.prompts)
    )
    limits = _limits(config, longest, shape)
    workers = _started(config, directory, limits, log, on_progress)
    return TrainerComponents(
        source=PromptSource(prompts.train, seed=config.run.seed, shuffle=config.data.shuffle),
        heldout=prompts.heldout.prompts,
        workers=workers,
        sampling=sampling_of(config, tokenizer),
        limits=limits,
        num_dropped=prompts.train.num_dropped + prompts.heldout.num_dropped,
        num_ungradable=prompts.train.num_ungradable + prompts.heldout.num_ungradable,
    )


def open_workers(
    config: RunConfig, *, max_prompt_len: int, log: Callable[[str], None] = to_stderr
) -> WorkerGroup:
    """Start the workers of a loop of your own, whose prompts have at most `max_prompt_len` tokens.

    Each has an engine, a learner and a drafter trainer. Call `publish` before the first `rollout`
    and `close` at the end; examples/rl_loop.py has the calls in between. Raises ConfigError if the
    model cannot be used.
    """
    config = precision.decided(config)
    set_threads(threads_each(config.run.threads, config.cluster.workers))
    directory = model_directory(config.model.path, log)
    _check(config, directory)
    limits = _limits(config, max_prompt_len, shape_of(directory))
    return _started(config, directory, limits, log, lambda progress: None)


def _started(
    config: RunConfig,
    directory: Path,
    limits: EngineLimits,
    log: Callable[[str], None],
    on_progress: Callable[[Progress], None],
) -> WorkerGroup:
    """Return the workers once all are ready."""
    directory = directory.absolute()  # another host's processes have other working directories
    given, learns = config.speculation.drafter, config.spot.train != "never"
    found = [located(name) for name in drafter_names(given, config.model.path, learns=learns)]
    folders = [directory, *(home for _, home in found if home is not None)]
    make = partial(build_worker, config, directory, [name for name, _ in found], limits)
    pool = _worker_pool(config, folders, make, log, on_progress)
    workers = WorkerGroup(pool, config, on_progress=on_progress, log=log)
    try:
        workers.begin()
    except BaseException:
        workers.close()
        raise
    return workers


def _check(config: RunConfig, directory: Path) -> None:
    """Raise ConfigError if this machine lacks what the run needs."""
    check_policy(directory, config)
    uses_vllm(config, directory)
    if config.learner.streaming and (why := why_not(config)) is not None:
        raise ConfigError(f"learner.streaming = true: {why}; leave it out, or change that")
    if config.is_sharded and torch.__version__ < _SHARDING_SINCE:
        raise ConfigError(
            f"learner.sharding = 'full' needs PyTorch {_SHARDING_SINCE} or newer, and this is "
            f"{torch.__version__}; update it, or set 'none'"
        )


def _worker_pool(
    config: RunConfig,
    folders: Sequence[Path],
    make: Callable[[Place], Worker],
    log: Callable[[str], None],
    on_progress: Callable[[Progress], None],
) -> WorkerPool:
    """Start the workers: one in this process, or several as Ray actors."""
    own = config.cluster
    if own.workers == 1 and not own.address:
        return LocalWorkerPool(make, on_progress)
    try:
        from longtail.cluster.workers.ray.hosts import own_kit
        from longtail.cluster.workers.ray.pool import RayWorkerPool
    except ImportError as error:
        raise ConfigError(
            f"cluster.workers = {own.workers}: more than one are Ray actors: "
            f"{machine.pip_install('cluster')}; or set it to 1"
        ) from error
    gpus = worker_gpus(config)
    kit = None
    if own.address:
        kit = own_kit(folders, on_cpu=not gpus, on_vllm=uses_vllm(config, folders[0]))
    return RayWorkerPool(make, own.workers, address=own.address, kit=kit, gpus=gpus, log=log)


def _limits(config: RunConfig, longest_prompt: int, shape: ModelConfig) -> EngineLimits:
    """Return the engine's limits for prompts of up to `longest_prompt` tokens."""
    longest = longest_prompt + config.rollout.max_tokens
    if longest > shape.max_positions:
        raise ConfigError(
            f"rollout.max_tokens = {config.rollout.max_tokens}: after the longest prompt, of "
            f"{longest_prompt} tokens, the model has "
            f"{max(shape.max_positions - longest_prompt, 0)} of its {shape.max_positions} "
            "positions left; lower it, or data.max_prompt_len with data.drop_long_prompts = true"
        )
    return EngineLimits(
        max_running=config.rollout.max_running,
        max_step_tokens=config.rollout.max_step_tokens,
        kv_tokens=config.rollout.kv_tokens,
        max_len=longest,
    )


def sampling_of(config: RunConfig, tokenizer: Tokenizer) -> SamplingParams:
    """Return how completions are sampled."""
    own = config.rollout
    return SamplingParams(
        temperature=own.temperature,
        top_k=own.top_k,
        top_p=own.top_p,
        min_p=own.min_p,
        max_tokens=own.max_tokens,
        stop=own.stop,
        stop_token_ids=tokenizer.eos_ids,
    )
