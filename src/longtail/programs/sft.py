"""Supervised fine-tuning, the program behind `longtail sft`.

It translates a configuration into the parts that teach (`rl.data.examples`, `rl.sft_learner`) and
moves examples through them. The run directory, its checkpoints and its resume are those of
`longtail train`; the model is in the newest checkpoint's `policy`.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from longtail.build.trainer import TINY_REASONER
from longtail.config import files as configfile
from longtail.config.sft import SftConfig
from longtail.errors import ConfigError
from longtail.model.hf.model import load_model, save_model
from longtail.model.hf.tokenizer import Tokenizer, check_vocabulary, load_tokenizer
from longtail.model.transformer import Transformer
from longtail.rl.data import tiny_task as task
from longtail.rl.data.examples import Example, ExampleBatches, example_of, make_examples
from longtail.rl.data.prompts import Encoder, PromptSet, PromptSource, hold_out
from longtail.rl.data.sources import Row, load_rows
from longtail.rl.optim import OptimizerSettings
from longtail.rl.sft_learner import SftLearner, SftReport, SftSettings
from longtail.run.checkpoint import Checkpoint, RunDirectory
from longtail.run.console import Console
from longtail.run.metrics import MetricWriter, open_writers
from longtail.system.device import choose_device, set_threads
from longtail.system.interrupt import Interrupted, Interruption
from longtail.tiny import warmstart

_HELDOUT_SHARE, _MAX_HELDOUT = 20, 64
"""One example in so many, at most so many of them, is not learned but measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Classroom:
    """What the loop drives."""

    model: Transformer
    tokenizer: Tokenizer
    imitator: SftLearner
    batches: ExampleBatches
    heldout: tuple[Example, ...]
    num_dropped: int


def run(config: SftConfig) -> int:
    """Run `longtail sft`: from the configuration to the last checkpoint; 130 if interrupted."""
    console = Console()
    set_threads(config.run.threads)
    with RunDirectory(Path(config.run.dir), keep=config.run.keep_checkpoints) as directory:
        checkpoint = directory.start(configfile.render(config), resume=config.run.resume)
        if checkpoint is not None and checkpoint.step >= config.train.steps:
            console.log(f"{checkpoint.policy}: its steps are done; raise train.steps to go on")
            return 0
        room = assemble(config)
        if checkpoint is not None:
            restore(room, checkpoint)
        writer = open_writers(
            config.run.writers,
            directory.path,
            last_step=None if checkpoint is None else checkpoint.step,
            config=config.model_dump(mode="json"),
        )
        try:
            return _teach(config, directory, room, writer, console)
        finally:
            writer.close()


def _teach(
    config: SftConfig,
    directory: RunDirectory,
    room: Classroom,
    writer: MetricWriter,
    console: Console,
) -> int:
    """Step until all steps are done or the user interrupts; a checkpoint either way."""
    _greet(config, room, console)
    interruption, steps, began = Interruption(), config.train.steps, time.perf_counter()
    tokens = 0
    saved = room.imitator.steps
    try:
        with interruption:
            while room.imitator.steps < steps:
                interruption.check()
                report = room.imitator.step(room.batches.take())
                step, tokens = room.imitator.steps, tokens + report.num_tokens
                speed = tokens / (time.perf_counter() - began)
                metrics = step_metrics(report, speed)
                if step % config.run.checkpoint_every == 0 or step == steps:
                    metrics |= heldout_metrics(room)
                    _save(directory, room)
                    saved = step
                writer.write(step, metrics)
                if step % config.run.log_every == 0 or step == steps:
                    console.log(_line(step, steps, metrics))
    except Interrupted:
        if saved < room.imitator.steps:
            _save(directory, room)
        console.log(f"stopped after step {room.imitator.steps}; start again to go on")
        return 130
    console.log(f"the model is in {directory.checkpoints / f'step_{steps:06d}' / 'policy'}")
    return 0


def assemble(config: SftConfig) -> Classroom:
    """Build every part; raises ConfigError for whatever the configuration and the data say."""
    model, tokenizer = _model(config)
    check_vocabulary(tokenizer, model.config)
    if config.data.max_len > model.config.max_positions:
        raise ConfigError(
            f"data.max_len = {config.data.max_len}: the model has {model.config.max_positions} "
            "positions; lower it"
        )
    examples = _examples(config, tokenizer)
    size = min(_MAX_HELDOUT, len(examples.prompts) // _HELDOUT_SHARE)
    parts = hold_out(examples, size)
    source = PromptSource(parts.train, seed=config.run.seed)
    return Classroom(
        model=model,
        tokenizer=tokenizer,
        imitator=SftLearner(model, _settings(config)),
        batches=ExampleBatches(source, config.train.batch_tokens),
        heldout=tuple(example_of(prompt) for prompt in parts.heldout.prompts),
        num_dropped=examples.num_dropped,
    )


def _model(config: SftConfig) -> tuple[Transformer, Tokenizer]:
    """Return the model to teach; `tiny-reasoner` is a fresh one."""
    device = choose_device(config.run.device)
    if config.model.path == TINY_REASONER:
        return warmstart.fresh(config.run.seed).to(device), warmstart.load_tokenizer()
    path = config.model.path
    return load_model(path, torch.float32, device), load_tokenizer(path)


def _examples(config: SftConfig, tokenizer: Tokenizer) -> PromptSet:
    data = config.data
    rows: Sequence[Row] = (
        task.examples(data.size, config.run.seed)
        if data.source == TINY_REASONER
        else load_rows(data.source, data.size, config.run.seed)
    )
    if not tokenizer.eos_ids:
        raise ConfigError(
            f"model.path = {config.model.path!r}: its tokenizer names no end-of-text token; set "
            "eos_token in tokenizer_config.json"
        )
    return make_examples(
        rows,
        source=data.source,
        encoder=Encoder(
            encode=tokenizer.encode,
            render=tokenizer.render if tokenizer.has_chat_template else None,
        ),
        eos_id=tokenizer.eos_ids[0],
        max_len=data.max_len,
        drop_long=data.drop_long,
        prompt_column=data.prompt_column,
        completion_column=data.completion_column,
    )


def _settings(config: SftConfig) -> SftSettings:
    own = config.train
    return SftSettings(
        optimizer=OptimizerSettings(
            learning_rate=own.learning_rate,
            schedule=own.schedule,
            warmup_steps=own.warmup_steps,
            total_steps=own.steps,
            weight_decay=own.weight_decay,
            betas=own.betas,
            max_grad_norm=own.max_grad_norm,
        ),
        tokens_per_micro_batch=own.tokens_per_micro_batch,
        recompute=own.gradient_checkpointing,
        autocast=own.autocast,
    )


def restore(room: Classroom, checkpoint: Checkpoint) -> None:
    """Put model, optimizer and data cursor where they were when the checkpoint was taken."""
    saved = load_model(checkpoint.policy, room.model.dtype)
    room.imitator.restore(checkpoint.step, checkpoint.tensors(), dict(saved.named_parameters()))
    room.batches.restore(checkpoint.state["cursor"])


def _save(directory: RunDirectory, room: Classroom) -> None:
    def save_policy(path: Path) -> None:
        save_model(room.model, path, eos_ids=room.tokenizer.eos_ids)
        room.tokenizer.save(path)

    directory.save(
        room.imitator.steps,
        save_policy,
        room.imitator.tensors(),
        {"cursor": room.batches.state()},
    )


def step_metrics(report: SftReport, tokens_per_s: float) -> dict[str, float]:
    """Name the numbers of a step."""
    return {
        "train/loss": report.loss,
        "train/entropy": report.entropy,
        "train/grad_norm": report.grad_norm,
        "train/learning_rate": report.learning_rate,
        "train/tokens": report.num_tokens,
        "perf/tokens_per_s": tokens_per_s,
    }


def heldout_metrics(room: Classroom) -> dict[str, float]:
    """Measure the loss on examples that are not learned; {} where there are none."""
    return {"heldout/loss": room.imitator.loss(room.heldout)} if room.heldout else {}


def _greet(config: SftConfig, room: Classroom, console: Console) -> None:
    parameters = sum(p.numel() for p in room.model.parameters())
    console.log(
        f"{config.model.path}: {parameters:,} parameters, {config.data.source}, "
        f"run directory {config.run.dir}"
        + (f", resumed after step {room.imitator.steps}" if room.imitator.steps else "")
    )
    if room.num_dropped:
        console.log(
            f"{room.num_dropped} examples over {config.data.max_len} tokens are left out "
            "(data.drop_long)"
        )


def _line(step: int, steps: int, metrics: dict[str, float]) -> str:
    heldout = metrics.get("heldout/loss", math.nan)
    return (
        f"step {step:>{len(str(steps))}}/{steps}  loss {metrics['train/loss']:.4f}  "
        + (f"held out {heldout:.4f}  " if math.isfinite(heldout) else "")
        + f"entropy {metrics['train/entropy']:.3f}  lr {metrics['train/learning_rate']:.2e}  "
        f"{metrics['perf/tokens_per_s']:,.0f} tok/s"
    )
