"""From a configuration to the parts of a run, everything checked before any work starts.

The only place that translates configuration into the numbers that parts take. What the parts then
do is the loop's business.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from longtail import machine
from longtail.checkpoint import Checkpoint
from longtail.config import RunConfig, SpeculationSection
from longtail.drafters import Target, open_drafters
from longtail.engine.engine import RolloutEngine
from longtail.engine.limits import EngineLimits
from longtail.engine.speculate import Speculation
from longtail.errors import ConfigError, NonFiniteError
from longtail.model import hf
from longtail.model.transformer import ModelConfig, Transformer
from longtail.rl.data import Encoder, HeldOut, PromptSet, PromptSource, hold_out, make_prompts
from longtail.rl.grading import check_columns
from longtail.rl.learner import Learner, LearnerSettings, LearnerState
from longtail.rl.optim import OptimizerSettings
from longtail.rl.sources import load_rows
from longtail.speculation.strategy import Strategy
from longtail.tiny import warmstart
from longtail.tuner.bandit import BanditTuner
from longtail.tuner.budget import BudgetTuner
from longtail.tuner.tuner import FixedTuner, OffTuner, Tuner
from longtail.types import Prompt, SamplingParams

TINY_REASONER = "tiny-reasoner"

_LESSONS_A_LINE = 50

_WORTH_SHARING = 512
"""Hidden size from which several threads decode faster than one."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the loop drives. None of them knows another."""

    source: PromptSource
    heldout: tuple[Prompt, ...]
    engine: RolloutEngine
    learner: Learner
    policy: Transformer
    """The learner's weights, for saving."""
    tokenizer: hf.Tokenizer
    sampling: SamplingParams
    num_dropped: int
    """Prompts left out because they were longer than the limit."""
    rollout_threads: int
    """Compute threads while generating."""
    drafter_s: float
    """Seconds that opening the drafter took: the embedded one may have been taught."""


def set_threads(threads: int) -> int:
    """Give this process so many compute threads (0: every core) and return the number."""
    count = threads or machine.usable_cores()
    torch.set_num_threads(count)
    return count


@contextlib.contextmanager
def compute_threads(count: int) -> Iterator[None]:
    """Compute on so many threads while inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def rollout_threads(shape: ModelConfig) -> int:
    """Decode a small model on one thread: its products are too short to share.

    Two threads that wait for each other some thousand times a second gain nothing on a quiet
    machine and lose tenfold on a busy one.
    """
    return 1 if shape.hidden_size < _WORTH_SHARING else torch.get_num_threads()


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def model_directory(path: str, say: Callable[[str], None] = _to_stderr) -> Path:
    """Return the Hugging Face directory that `model.path` names, warm-starting the embedded one.

    The warm start takes minutes, once, and tells `say` how far it is.
    """
    if path != TINY_REASONER:
        return Path(path)

    def tell(lesson: warmstart.Lesson) -> None:
        if lesson.step == 1:
            say(f"teaching the tiny reasoner, once; kept in {warmstart.cache_directory()}")
        if lesson.step % _LESSONS_A_LINE == 0 or lesson.step == lesson.steps:
            say(lesson.line())

    return warmstart.ensure(on_progress=tell)


def assemble(config: RunConfig, directory: Path, say: Callable[[str], None] = _to_stderr) -> Parts:
    """Build every part from the model in `directory`; `say` hears of a drafter being taught.

    Raises ConfigError for whatever the configuration, the model and the data say against it.
    """
    device = choose_device(config.run.device)
    shape = hf.load_config(directory)
    tokenizer = hf.load_tokenizer(directory)
    hf.check_vocabulary(tokenizer, shape)
    prompts = _prompts(config, tokenizer)
    for some in (prompts.train.prompts, prompts.heldout.prompts):
        check_columns(config.reward.name, some)
    limits = _limits(config, prompts, shape)
    policy = hf.load_model(directory, DTYPES[config.learner.dtype], device)
    rollout_model = hf.load_model(directory, DTYPES[config.rollout.dtype], device)
    target = Target(
        model=rollout_model, tokenizer=tokenizer, directory=directory, name=config.model.path
    )
    began = time.perf_counter()
    speculation = _speculation(config.speculation, config.run.seed, target, say)
    drafter_s = time.perf_counter() - began
    return Parts(
        source=PromptSource(prompts.train, seed=config.run.seed, shuffle=config.data.shuffle),
        heldout=prompts.heldout.prompts,
        engine=RolloutEngine(rollout_model, tokenizer.decode, limits, speculation=speculation),
        learner=Learner(policy, _learner_settings(config)),
        policy=policy,
        tokenizer=tokenizer,
        sampling=_sampling(config, tokenizer),
        num_dropped=prompts.train.num_dropped + prompts.heldout.num_dropped,
        rollout_threads=rollout_threads(shape),
        drafter_s=drafter_s,
    )


def _speculation(
    own: SpeculationSection, seed: int, target: Target, say: Callable[[str], None]
) -> Speculation | None:
    drafters = open_drafters(own.drafter, target, say)
    if not drafters:
        return None
    fixed = Strategy(depth=own.depth, width=own.width, size=own.size)
    tuners: dict[str, Callable[[], Tuner]] = {
        "budget": BudgetTuner,
        "beg-mab": lambda: BanditTuner(seed=seed),
        "fixed": lambda: FixedTuner(fixed, max_running=own.max_running),
        "off": OffTuner,
    }
    return Speculation(drafters=drafters, tuner=tuners[own.tuner](), coupled=own.coupled)


def _limits(config: RunConfig, prompts: HeldOut, shape: ModelConfig) -> EngineLimits:
    """Size the engine by the longest prompt there is."""
    longest_prompt = max(
        len(prompt.tokens) for prompt in (*prompts.train.prompts, *prompts.heldout.prompts)
    )
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


def _sampling(config: RunConfig, tokenizer: hf.Tokenizer) -> SamplingParams:
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


def choose_device(name: str) -> torch.device:
    """Return the device that `run.device` names; raises ConfigError where there is none such."""
    chosen = ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
    if chosen.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"run.device = {name!r}: PyTorch sees no GPU here; use auto or cpu")
    return torch.device(chosen)


def _prompts(config: RunConfig, tokenizer: hf.Tokenizer) -> HeldOut:
    """Load prompts to train on and prompts held out, of which there may be none."""
    data, seed = config.data, config.run.seed
    encoder = Encoder(
        encode=tokenizer.encode, render=tokenizer.render if tokenizer.has_chat_template else None
    )

    def load(source: str, size: int, field: str) -> PromptSet:
        return make_prompts(
            load_rows(source, size, seed, field=field),
            source=source,
            encoder=encoder,
            max_prompt_len=data.max_prompt_len,
            drop_long=data.drop_long_prompts,
            prompt_column=data.prompt_column,
            answer_column=data.answer_column,
        )

    heldout = data.heldout
    if heldout is None and data.source == TINY_REASONER:
        heldout = f"{TINY_REASONER}:heldout"  # disjoint by construction
    everything = load(data.source, data.size, "data.source")
    if data.heldout_size == 0:
        none = PromptSet(source=data.source, prompts=(), num_dropped=0)
        return HeldOut(train=everything, heldout=none)
    if heldout is None:
        return hold_out(everything, data.heldout_size)
    held = load(heldout, data.heldout_size, "data.heldout")
    return HeldOut(
        train=everything, heldout=replace(held, prompts=held.prompts[: data.heldout_size])
    )


def _learner_settings(config: RunConfig) -> LearnerSettings:
    own = config.learner
    return LearnerSettings(
        loss=own.loss,
        optimizer=OptimizerSettings(
            learning_rate=own.learning_rate,
            schedule=own.schedule,
            warmup_steps=own.warmup_steps,
            total_steps=config.run.steps,
            weight_decay=own.weight_decay,
            betas=own.betas,
            max_grad_norm=own.max_grad_norm,
        ),
        clip_low=own.clip_low,
        clip_high=own.clip_high,
        kl_coef=own.kl_coef,
        importance_cap=own.importance_cap,
        recompute=own.gradient_checkpointing,
        autocast=own.autocast,
    )


def publish(parts: Parts) -> None:
    """Hand the learner's weights to the engine, unless an update broke them.

    Raises NonFiniteError naming the tensor, so that nothing is written with it or saved of it.
    """
    weights = parts.learner.weights()
    for name, tensor in weights.tensors.items():
        if not tensor.isfinite().all():
            raise NonFiniteError(f"{name} is not finite in policy version {weights.version}")
    parts.engine.pull(weights)


def save_policy(parts: Parts, path: Path) -> None:
    """Write weights, generation config and tokenizer as a Hugging Face directory."""
    hf.save_model(parts.policy, path, eos_ids=parts.tokenizer.eos_ids)
    parts.tokenizer.save(path)


def restore(parts: Parts, checkpoint: Checkpoint) -> None:
    """Put the learner and the prompt source where they were when the checkpoint was taken.

    The learner keeps the weights it was built with as its KL reference.
    """
    saved = hf.load_model(checkpoint.policy, parts.policy.dtype)
    parts.learner.restore(
        LearnerState(tensors=checkpoint.tensors(), numbers=checkpoint.state["learner"]),
        dict(saved.named_parameters()),
    )
    parts.source.restore(checkpoint.state["cursor"])
