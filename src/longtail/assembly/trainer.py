"""Construction of a training run from its configuration; everything is checked before it starts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path

from longtail.assembly import memory_bound, precision
from longtail.assembly.drafters import drafter_names, located
from longtail.assembly.plan import RunPlan, limit_on, plan_run
from longtail.assembly.worker import build_worker
from longtail.cluster.group import WorkerGroup
from longtail.cluster.records import Progress
from longtail.cluster.workers.processes import LocalProcess, Place, Processes
from longtail.cluster.workers.worker import Worker
from longtail.config.rl import RunConfig
from longtail.engine.request import EngineLimits
from longtail.errors import ConfigError, RequestError
from longtail.model.hf.tokenizer import Tokenizer, load_tokenizer
from longtail.model.roofline import Limit
from longtail.model.size import count_parameters
from longtail.rl.data.prompts import HeldOut, PromptSource
from longtail.rl.processes.pool import confinement
from longtail.run.base_model import Base, model_directory
from longtail.system import machine
from longtail.system.device import set_threads, threads_each, to_stderr
from longtail.types import Prompt, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerComponents:
    """Components of the training loop."""

    source: PromptSource
    heldout: tuple[Prompt, ...]
    workers: WorkerGroup
    num_parameters: int
    """Number of parameters of the policy."""
    sampling: SamplingParams
    limit: Callable[[], Limit | None]
    """Measures this machine; None where vLLM or other hosts generate."""


def assemble(  # noqa: PLR0913 - the parts of a run
    config: RunConfig,
    directory: Path,
    base: Base | None,
    read_prompts: Callable[[Tokenizer], HeldOut],
    log: Callable[[str], None] = to_stderr,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    now: datetime | None = None,
) -> TrainerComponents:
    """Build all components from the model in `directory`, and its base if the run needs one.

    `on_progress` is called during rollouts and may raise; `now` is the time that chat templates
    write. Raises ConfigError if configuration, model and data do not fit together.
    """
    plan = replace(memory_bound.fitted(plan_run(config, directory, base), log), now=now)
    tokenizer = load_tokenizer(directory)
    memory_bound.check(plan)
    tokenizer.limit(plan.shape.vocab_size)
    sampling, prompts = sampling_of(config, tokenizer), read_prompts(tokenizer)
    train, heldout = prompts.train.prompts, prompts.heldout.prompts
    longest = max(len(prompt.tokens) for prompt in (*train, *heldout))
    return TrainerComponents(
        source=PromptSource(prompts.train, seed=config.run.seed, shuffle=config.data.shuffle),
        heldout=heldout,
        workers=_started(plan, longest, log, on_progress),
        num_parameters=count_parameters(plan.shape),
        sampling=sampling,
        limit=partial(limit_on, plan),
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
    plan = memory_bound.fitted(plan_run(config, model_directory(config.model.path, log)), log)
    return _started(plan, max_prompt_len, log, lambda progress: None)


def _started(
    plan: RunPlan,
    longest_prompt: int,
    log: Callable[[str], None],
    on_progress: Callable[[Progress], None],
) -> WorkerGroup:
    """Return the workers once all are ready: one in this process, or several as Ray actors."""
    config, own, limits = plan.config, plan.config.cluster, _limits(plan, longest_prompt)
    confined = confinement(network=config.environment.network) if config.environment.is_on else []
    for line in (*precision.costs(config), *precision.inexactness(config), *confined):
        log(line)
    given, learns = config.speculation.drafter, config.spot.train != "never"
    found = [located(name) for name in drafter_names(given, config.model.path, learns=learns)]
    make = partial(build_worker, plan, [name for name, _ in found], limits)
    if own.workers == 1 and not own.address:
        processes: Processes = LocalProcess(make, on_progress)
    else:
        folders = [plan.directory, *(home for _, home in found if home is not None)]
        processes = _ray_processes(plan, folders, make, log)
    workers = WorkerGroup(processes, config, on_progress=on_progress, log=log)
    try:
        workers.begin()
    except BaseException:
        workers.close()
        raise
    return workers


def _ray_processes(
    plan: RunPlan,
    folders: Sequence[Path],
    make: Callable[[Place], Worker],
    log: Callable[[str], None],
) -> Processes:
    """Start Ray actors, which on other hosts have copies of the folders."""
    own = plan.config.cluster
    try:
        from longtail.cluster.workers.ray.host_checks import own_kit
        from longtail.cluster.workers.ray.ray_processes import RayProcesses
    except ImportError as error:
        raise ConfigError(
            f"cluster.workers = {own.workers}: more than one are Ray actors: "
            f"{machine.pip_install('cluster')}; or set it to 1"
        ) from error
    kit = own_kit(folders, on_cpu=not plan.gpus, on_vllm=plan.on_vllm) if own.address else None
    return RayProcesses(make, own.workers, address=own.address, kit=kit, gpus=plan.gpus, log=log)


def _limits(plan: RunPlan, longest_prompt: int) -> EngineLimits:
    """Return the engine's limits for prompts of up to `longest_prompt` tokens."""
    own, most = plan.config.rollout, plan.shape.max_positions
    longest = plan.config.longest(longest_prompt)
    if longest > most:
        left = max(most - longest + own.max_tokens, 0)
        environment = plan.config.environment
        between = f" and environment.max_observed = {environment.max_observed}"
        between = between if environment.is_on else ""
        raise ConfigError(
            f"rollout.max_tokens = {own.max_tokens}: after the longest prompt, of {longest_prompt} "
            f"tokens,{between} the model has {left} of its {most} positions left; lower it, "
            "or data.max_prompt_len with data.drop_long_prompts = true"
        )
    return EngineLimits(
        max_running=own.max_running,
        max_step_tokens=own.max_step_tokens,
        kv_tokens=own.kv_tokens,
        max_len=longest,
    )


def sampling_of(config: RunConfig, tokenizer: Tokenizer) -> SamplingParams:
    """Return how completions are sampled."""
    names = {"temperature", "top_k", "top_p", "min_p", "max_tokens", "stop"}
    own = config.rollout.model_dump(include=names)
    try:
        return tokenizer.ends.stopping(SamplingParams(**own))
    except RequestError as error:
        raise ConfigError(f"rollout.{error}") from error
