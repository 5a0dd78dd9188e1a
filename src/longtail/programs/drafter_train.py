"""Offline training of an EAGLE drafter, the program behind `longtail drafter train`.

    texts (written by the target, or given) --> batches --> DrafterTrainer --> drafter directory

It translates a configuration into parts and moves texts through them. The run directory, its
checkpoints and its resume are those of `longtail train`; a checkpoint's `policy` is the drafter.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console as RichConsole
from rich.table import Table

from longtail.build.drafters import Target, read_drafter
from longtail.build.engine import locate_model
from longtail.config import files as configfile
from longtail.config.drafter import UNROLL_STEPS, DrafterTrainConfig
from longtail.drafter.eagle.fresh import commonest_tokens, fresh_drafter
from longtail.drafter.eagle.layer import EagleConfig, EagleLayer, default_layers
from longtail.drafter.formats.checkpoint import (
    LoadedDrafter,
    TargetIdentity,
    TrainingRecord,
    identity,
    load_drafter,
    save_drafter,
)
from longtail.drafter.training.texts import TextBatches, pack_texts
from longtail.drafter.training.trainer import (
    DepthReport,
    DrafterTrainer,
    TrainerReport,
    TrainerSettings,
)
from longtail.engine.report import StepReport
from longtail.errors import ConfigError
from longtail.model.hf.model import load_config, load_model
from longtail.model.hf.tokenizer import Tokenizer, check_vocabulary, load_tokenizer
from longtail.model.transformer import ModelConfig, Transformer
from longtail.programs.drafter_data import Corpus, generated_texts, given_texts
from longtail.rl.optim import OptimizerSettings
from longtail.run.checkpoint import Checkpoint, RunDirectory
from longtail.run.console import Console
from longtail.run.metrics import MetricWriter, open_writers
from longtail.system.device import DTYPES, choose_device, set_threads
from longtail.system.interrupt import Interrupted, Interruption

MEASURED_DEPTHS = 6
"""Held-out text is drafted so deep, or as deep as is trained."""
_SAMPLE = 16
"""Texts whose features size a fresh drafter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Classroom:
    """What the loop drives."""

    trainer: DrafterTrainer
    batches: TextBatches
    corpus: Corpus
    target: TargetIdentity


@dataclass(slots=True)
class _Progress:
    """What a run has seen so far."""

    tokens: int = 0
    """Those of earlier sittings included."""
    saved: int = 0
    """Step of the last checkpoint."""
    sitting: int = 0
    """Tokens of this sitting."""
    began: float = field(default_factory=time.perf_counter)


def run(config: DrafterTrainConfig) -> int:
    """Run `longtail drafter train`: from the configuration to the last checkpoint."""
    console = Console()
    set_threads(config.run.threads)
    with RunDirectory(Path(config.run.dir), keep=config.run.keep_checkpoints) as directory:
        checkpoint = directory.start(configfile.render(config), resume=config.run.resume)
        if checkpoint is not None and checkpoint.step >= config.train.steps:
            console.log(f"{checkpoint.policy}: its steps are done; raise train.steps to go on")
            return 0
        interruption = Interruption()
        try:
            with interruption:
                room = assemble(config, directory.path, checkpoint, console, interruption)
        except Interrupted:
            console.log("stopped before the first step; start again to go on")
            return 130
        progress = _Progress()
        if checkpoint is not None:
            restore(room, checkpoint)
            progress.tokens, progress.saved = checkpoint.state["tokens"], checkpoint.step
        writer = open_writers(
            config.run.writers,
            directory.path,
            last_step=None if checkpoint is None else checkpoint.step,
            config=config.model_dump(mode="json"),
        )
        try:
            return _teach(config, directory, room, writer, console, progress)
        finally:
            writer.close()


def assemble(
    config: DrafterTrainConfig,
    run_dir: Path,
    checkpoint: Checkpoint | None,
    console: Console,
    interruption: Interruption,
) -> Classroom:
    """Build every part; raises ConfigError for whatever the configuration and the data say."""
    path = locate_model(config.target.path)
    tokenizer, shape = load_tokenizer(path), load_config(path)
    check_vocabulary(tokenizer, shape)
    drafter = _drafter(config, shape)

    def load_target() -> Transformer:
        return load_model(path, DTYPES[config.target.dtype], choose_device(config.run.device))

    given, init = None, config.drafter.init
    if checkpoint is None and init is not None:  # refused before the target writes texts for it
        source = Target(
            model=load_target(), tokenizer=tokenizer, directory=path, name=config.target.path
        )
        given = _given_drafter(init, source, console)
        del source

    def on_step(report: StepReport) -> None:
        console.rollout_step(report)
        interruption.check()

    def announce(count: int) -> None:
        console.log(f"{config.target.path} writes {count} completions, once, into {run_dir}")
        console.begin_rollout("texts", count)

    corpus = (
        given_texts(config, tokenizer)
        if config.data.completions == "given"
        else generated_texts(
            config, tokenizer, load_target, run_dir / "texts.jsonl", on_step, announce
        )
    )
    target = load_target()
    target.fuse()
    if checkpoint is not None:
        given = load_drafter(checkpoint.policy, target, tokenizer, strict_weights=True)
    if given is not None:
        layer, ids, head = given.layer, given.draft_ids, given.head
    else:
        layer, ids = _fresh_layer(config, drafter, target, tokenizer, corpus)
        head = None
    settings = _settings(config, layer)
    room = Classroom(
        trainer=DrafterTrainer(layer, target, settings, draft_ids=ids, head=head),
        batches=TextBatches(corpus.learned, config.train.batch_tokens, config.run.seed),
        corpus=corpus,
        target=identity(config.target.path, target, tokenizer),
    )
    _greet(config, room, console, checkpoint)
    return room


def restore(room: Classroom, checkpoint: Checkpoint) -> None:
    """Put drafter, optimizer and cursor where they were when the checkpoint was taken."""
    room.trainer.restore(checkpoint.step, checkpoint.tensors())
    room.batches.restore(checkpoint.state["cursor"])


def _teach(
    config: DrafterTrainConfig,
    directory: RunDirectory,
    room: Classroom,
    writer: MetricWriter,
    console: Console,
    progress: _Progress,
) -> int:
    """Step until all steps are done or the user interrupts; a checkpoint either way."""
    interruption, steps = Interruption(), config.train.steps
    depths: DepthReport | None = None
    try:
        with interruption:
            while room.trainer.steps < steps:
                interruption.check()
                texts = pack_texts(room.batches.take(), config.train.tokens_per_micro_batch)
                report = room.trainer.step(texts)
                step = room.trainer.steps
                progress.tokens += report.num_tokens
                progress.sitting += report.num_tokens
                speed = progress.sitting / (time.perf_counter() - progress.began)
                metrics = step_metrics(report, speed)
                if step % config.run.checkpoint_every == 0 or step == steps:
                    depths = _measure(config, room)
                    metrics |= {} if depths is None else heldout_metrics(depths)
                    _save(config, directory, room, progress, depths)
                writer.write(step, metrics)
                if step % config.run.log_every == 0 or step == steps:
                    console.log(_line(step, steps, metrics))
                if step == progress.saved and depths is not None:
                    console.log(_heldout_line(depths))
    except Interrupted:
        if progress.saved < room.trainer.steps:
            _save(config, directory, room, progress, None)
        console.log(f"stopped after step {room.trainer.steps}; start again to go on")
        return 130
    path = directory.checkpoints / f"step_{steps:06d}" / "policy"
    _summarize(room, depths, progress, path)
    return 0


def _drafter(config: DrafterTrainConfig, shape: ModelConfig) -> EagleConfig:
    own, name = config.drafter, config.target.path
    if own.layers and own.layers[-1] >= shape.num_layers:
        raise ConfigError(
            f"drafter.layers = {list(own.layers)}: {name} has {shape.num_layers} layers, counted "
            "from 0"
        )
    if own.draft_vocab_size > shape.vocab_size:
        raise ConfigError(
            f"drafter.draft_vocab_size = {own.draft_vocab_size}: {name} has {shape.vocab_size} "
            "tokens; give fewer, or 0 for all"
        )
    usual = default_layers(shape.num_layers)
    return EagleConfig(
        recipe=own.recipe,
        target=shape,
        layers=() if own.recipe == "eagle1" else own.layers or usual,
        window=own.window,
        draft_vocab_size=own.draft_vocab_size,
    )


def _given_drafter(init: str, target: Target, console: Console) -> LoadedDrafter:
    """Read the drafter to go on from."""
    given = read_drafter(init, target, console.log, _working(target.model), field="drafter.init")
    if given is None:
        raise ConfigError(
            f"drafter.init = {init!r}: it has no EAGLE layer to train; give a drafter directory"
        )
    return given


def _fresh_layer(
    config: DrafterTrainConfig,
    drafter: EagleConfig,
    target: Transformer,
    tokenizer: Tokenizer,
    corpus: Corpus,
) -> tuple[EagleLayer, torch.Tensor | None]:
    size = drafter.draft_vocab_size
    ids = commonest_tokens(corpus.learned, size, tokenizer.eos_ids) if size else None
    sample = pack_texts(corpus.learned[:_SAMPLE], config.train.tokens_per_micro_batch)[0]
    generator = torch.Generator().manual_seed(config.run.seed)
    layer = fresh_drafter(drafter, target, sample, generator)
    return layer.to(_working(target)), ids


def _working(target: Transformer) -> torch.dtype:
    """Return the dtype that a drafter of this target is trained in."""
    return torch.float64 if target.dtype == torch.float64 else torch.float32


def _num_unrolled(config: DrafterTrainConfig, layer: EagleLayer) -> int:
    """Depths that are trained; a drafter that is gone on with brings its recipe."""
    return config.drafter.unroll_steps or UNROLL_STEPS[layer.config.recipe]


def _settings(config: DrafterTrainConfig, layer: EagleLayer) -> TrainerSettings:
    own = config.train
    return TrainerSettings(
        unroll_steps=_num_unrolled(config, layer),
        optimizer=OptimizerSettings(
            learning_rate=own.learning_rate,
            schedule=own.schedule,
            warmup_steps=own.warmup_steps,
            total_steps=own.steps,
            weight_decay=own.weight_decay,
            betas=own.betas,
            max_grad_norm=own.max_grad_norm,
        ),
        matrix_rate=own.matrix_rate or None,
        autocast=own.autocast,
    )


def _measure(config: DrafterTrainConfig, room: Classroom) -> DepthReport | None:
    texts = room.corpus.heldout
    if not texts:
        return None
    packed = pack_texts(texts, config.train.tokens_per_micro_batch)
    depths = max(MEASURED_DEPTHS, _num_unrolled(config, room.trainer.layer))
    return room.trainer.evaluate(packed, depths)


def _save(
    config: DrafterTrainConfig,
    directory: RunDirectory,
    room: Classroom,
    progress: _Progress,
    depths: DepthReport | None,
) -> None:
    record = TrainingRecord(
        steps=room.trainer.steps,
        tokens=progress.tokens,
        unroll_steps=_num_unrolled(config, room.trainer.layer),
        agreement=() if depths is None else depths.agreement,
        overlap=() if depths is None else depths.overlap,
        accept_len=None if depths is None else depths.accept_len,
    )

    def save_policy(path: Path) -> None:
        trainer = room.trainer
        save_drafter(path, trainer.layer, trainer.draft_ids, room.target, record, trainer.head)

    state = {"cursor": room.batches.state(), "tokens": progress.tokens}
    directory.save(room.trainer.steps, save_policy, room.trainer.tensors(), state)
    progress.saved = room.trainer.steps


def step_metrics(report: TrainerReport, tokens_per_s: float) -> dict[str, float]:
    """Name the numbers of a step."""
    return {
        "train/loss": report.loss,
        "train/accept_len": report.depths.accept_len,
        "train/grad_norm": report.grad_norm,
        "train/learning_rate": report.learning_rate,
        "train/tokens": report.num_tokens,
        "perf/tokens_per_s": tokens_per_s,
    }


def heldout_metrics(depths: DepthReport) -> dict[str, float]:
    """Name the numbers of a measurement."""
    named = {"agreement": depths.agreement, "overlap": depths.overlap}
    return {"heldout/accept_len": depths.accept_len} | {
        f"heldout/{name}_{depth}": value
        for name, values in named.items()
        for depth, value in enumerate(values, 1)
    }


def _greet(
    config: DrafterTrainConfig, room: Classroom, console: Console, checkpoint: Checkpoint | None
) -> None:
    layer, corpus = room.trainer.layer, room.corpus
    count = sum(parameter.numel() for parameter in layer.parameters())
    console.log(
        f"{layer.config.recipe} drafter of {config.target.path}: {count:,} parameters, "
        f"{len(corpus.learned)} texts, {len(corpus.heldout)} held out, run directory "
        f"{config.run.dir}" + (f", resumed after step {checkpoint.step}" if checkpoint else "")
    )
    if corpus.num_dropped:
        console.log(f"{corpus.num_dropped} rows are left out: too long a prompt, or too short")


def _line(step: int, steps: int, metrics: dict[str, float]) -> str:
    return (
        f"step {step:>{len(str(steps))}}/{steps}  loss {metrics['train/loss']:.4f}  "
        f"expected accept length {metrics['train/accept_len']:.2f}  "
        f"lr {metrics['train/learning_rate']:.2e}  {metrics['perf/tokens_per_s']:,.0f} tok/s"
    )


def _heldout_line(depths: DepthReport) -> str:
    overlaps = " ".join(f"{overlap:.3f}" for overlap in depths.overlap)
    return f"held out: overlap {overlaps}, expected accept length {depths.accept_len:.2f}"


def _summarize(
    room: Classroom, depths: DepthReport | None, progress: _Progress, path: Path
) -> None:
    """Print on stdout what was reached, and where it is."""
    out = RichConsole(highlight=False, width=None if sys.stdout.isatty() else 200)
    if depths is not None:
        table = Table(title="drafter, on held-out text", title_justify="left")
        columns: tuple[tuple[str, Callable[[int], str]], ...] = (
            ("depth", lambda depth: str(depth + 1)),
            ("overlap (temperature 1)", lambda depth: f"{depths.overlap[depth]:.3f}"),
            ("agreement (temperature 0)", lambda depth: f"{depths.agreement[depth]:.3f}"),
        )
        for name, _ in columns:
            table.add_column(name, justify="right")
        for depth in range(len(depths.overlap)):
            table.add_row(*(cell(depth) for _, cell in columns))
        out.print(table)
        out.print(f"expected accept length of such a chain: {depths.accept_len:.2f}")
    steps = room.trainer.steps
    out.print(f"{steps} steps, {progress.tokens:,} tokens", markup=False)
    out.print(f"drafter: {path}", markup=False, soft_wrap=True)
