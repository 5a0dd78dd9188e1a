"""From a configuration to the parts of a run, everything checked before any work starts.

The only place that translates configuration into the numbers that parts take. What the parts then
do is the loop's business.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from longtail import machine
from longtail.config import RunConfig
from longtail.engine.engine import EngineLimits, RolloutEngine
from longtail.errors import ConfigError
from longtail.model import hf
from longtail.model.transformer import Transformer
from longtail.rl.data import Encoder, PromptSet, PromptSource, hold_out, make_prompts
from longtail.rl.grading import check_columns
from longtail.rl.learner import Learner, LearnerSettings
from longtail.rl.optim import OptimizerSettings
from longtail.rl.sources import load_rows
from longtail.types import Prompt, SamplingParams

TINY_REASONER = "tiny-reasoner"

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


def set_threads(threads: int) -> int:
    """Give this process so many compute threads (0: every core) and return the number."""
    count = threads or machine.usable_cores()
    torch.set_num_threads(count)
    return count


def model_directory(path: str) -> Path:
    """Return the Hugging Face directory that `model.path` names, warm-starting the embedded one."""
    if path != TINY_REASONER:
        return Path(path)
    from longtail.tiny import warmstart

    return warmstart.ensure()


def assemble(config: RunConfig, directory: Path) -> Parts:
    """Build every part from the model in `directory`.

    Raises ConfigError for whatever the configuration, the model and the data say against it.
    """
    device = _device(config.run.device)
    tokenizer = hf.load_tokenizer(directory)
    sampling = SamplingParams(
        temperature=config.rollout.temperature,
        top_k=config.rollout.top_k,
        top_p=config.rollout.top_p,
        min_p=config.rollout.min_p,
        max_tokens=config.rollout.max_tokens,
        stop=config.rollout.stop,
        stop_token_ids=tokenizer.eos_ids,
    )
    train, heldout = _prompts(config, tokenizer)
    for prompts in (train.prompts, heldout):
        check_columns(config.reward.name, prompts)
    policy = hf.load_model(directory, DTYPES[config.learner.dtype], device)
    hf.check_vocabulary(tokenizer, policy.config)
    rollout_model = hf.load_model(directory, DTYPES[config.rollout.dtype], device)
    longest_prompt = max(len(prompt.tokens) for prompt in (*train.prompts, *heldout))
    limits = EngineLimits(
        max_running=config.rollout.max_running,
        max_step_tokens=config.rollout.max_step_tokens,
        kv_tokens=config.rollout.kv_tokens,
        max_len=longest_prompt + config.rollout.max_tokens,
    )
    return Parts(
        source=PromptSource(train, seed=config.run.seed, shuffle=config.data.shuffle),
        heldout=heldout,
        engine=RolloutEngine(rollout_model, tokenizer.decode, limits),
        learner=Learner(policy, _learner_settings(config)),
        policy=policy,
        tokenizer=tokenizer,
        sampling=sampling,
    )


def _device(name: str) -> torch.device:
    chosen = ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
    if chosen.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"run.device = {name!r}: PyTorch sees no GPU here; use auto or cpu")
    return torch.device(chosen)


def _prompts(config: RunConfig, tokenizer: hf.Tokenizer) -> tuple[PromptSet, tuple[Prompt, ...]]:
    """Load prompts to train on and prompts held out."""
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
        return everything, ()
    if heldout is None:
        cut = hold_out(everything, data.heldout_size)
        return cut.train, cut.heldout.prompts
    held = load(heldout, data.heldout_size, "data.heldout")
    return everything, held.prompts[: data.heldout_size]


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


def save_policy(parts: Parts, path: Path) -> None:
    """Write weights, generation config and tokenizer as a Hugging Face directory."""
    hf.save_model(parts.policy, path, eos_ids=parts.tokenizer.eos_ids)
    parts.tokenizer.save(path)
