"""Construction of a training run from its configuration; everything is checked before it starts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from longtail.assembly import memory, precision
from longtail.assembly.drafters import drafter_names, located
from longtail.assembly.engine import model_directory
from longtail.assembly.plan import RunPlan, plan_run
from longtail.assembly.prompts import load_prompts
from longtail.assembly.worker import build_worker
from longtail.cluster.group import WorkerGroup
from longtail.cluster.records import GroupSettings, Progress
from longtail.cluster.workers.processes import LocalProcess, Place, Processes
from longtail.cluster.workers.worker import Worker
from longtail.config.rl import RunConfig
from longtail.engine.request import EngineLimits
from longtail.errors import ConfigError
from longtail.model.hf.tokenizer import Tokenizer, check_vocabulary, load_tokenizer
from longtail.rl.data.prompts import PromptSource
from longtail.rl.grading.pool import Check
from longtail.rl.streaming import streams
from longtail.system import machine
from longtail.system.device import set_threads, threads_each, to_stderr
from longtail.types import Prompt, SamplingParams


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
    plan, tokenizer = memory.fitted(plan_run(config, directory), log), load_tokenizer(directory)
    memory.check(plan)
    check_vocabulary(tokenizer, plan.shape)
    prompts = load_prompts(config, tokenizer, check)
    longest = max(
        len(prompt.tokens) for prompt in (*prompts.train.prompts, *prompts.heldout.prompts)
    )
    limits = _limits(plan, longest)
    workers = _started(plan, limits, log, on_progress)
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
    plan = memory.fitted(plan_run(config, model_directory(config.model.path, log)), log)
    return _started(plan, _limits(plan, max_prompt_len), log, lambda progress: None)


def _started(
    plan: RunPlan,
    limits: EngineLimits,
    log: Callable[[str], None],
    on_progress: Callable[[Progress], None],
) -> WorkerGroup:
    """Return the workers once all are ready."""
    config = plan.config
    given, learns = config.speculation.drafter, config.spot.train != "never"
    found = [located(name) for name in drafter_names(given, config.model.path, learns=learns)]
    folders = [plan.directory, *(home for _, home in found if home is not None)]
    make = partial(build_worker, plan, [name for name, _ in found], limits)
    pool = _worker_pool(plan, folders, make, log, on_progress)
    workers = WorkerGroup(pool, group_settings(config), on_progress=on_progress, log=log)
    try:
        workers.begin()
    except BaseException:
        workers.close()
        raise
    return workers


def group_settings(config: RunConfig) -> GroupSettings:
    """Return the settings of the workers as a group."""
    return GroupSettings(
        cluster=config.cluster,
        max_running=config.rollout.max_running,
        shares=config.rollout.sharing,
        learns_ahead=streams(config.learner),
        is_sharded=config.is_sharded,
        buffer_bytes=config.spot.buffer_mb * 2**20,
        seed=config.run.seed,
    )


def _worker_pool(
    plan: RunPlan,
    folders: Sequence[Path],
    make: Callable[[Place], Worker],
    log: Callable[[str], None],
    on_progress: Callable[[Progress], None],
) -> Processes:
    """Start the workers: one in this process, or several as Ray actors."""
    own = plan.config.cluster
    if own.workers == 1 and not own.address:
        return LocalProcess(make, on_progress)
    try:
        from longtail.cluster.workers.ray.hosts import own_kit
        from longtail.cluster.workers.ray.ray_processes import RayProcesses
    except ImportError as error:
        raise ConfigError(
            f"cluster.workers = {own.workers}: more than one are Ray actors: "
            f"{machine.pip_install('cluster')}; or set it to 1"
        ) from error
    kit = None
    if own.address:
        kit = own_kit(folders, on_cpu=not plan.gpus, on_vllm=plan.on_vllm)
    return RayProcesses(make, own.workers, address=own.address, kit=kit, gpus=plan.gpus, log=log)


def _limits(plan: RunPlan, longest_prompt: int) -> EngineLimits:
    """Return the engine's limits for prompts of up to `longest_prompt` tokens."""
    config, shape = plan.config, plan.shape
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
