"""Offline training of a drafter, the program behind `longtail drafter train`.

    sequences (generated or given) --> batches --> DrafterTrainer --> drafter directory

It builds the components from a configuration; the loop is `programs.steps`. The run directory and
its checkpoints are those of `longtail train`; a checkpoint's `policy` is the drafter.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch

from longtail.assembly.drafters import Target, check_names, read_drafter
from longtail.assembly.precision import decided, run_device
from longtail.config.drafter import DrafterSection, DrafterTrainConfig, DrafterTrainSection
from longtail.drafter.formats.checkpoint import (
    LoadedDrafter,
    TargetIdentity,
    TrainingRecord,
    identity,
    load_drafter,
)
from longtail.drafter.kind import (
    DepthReport,
    DraftConfig,
    DrafterKind,
    DraftLayer,
    LayerTrainer,
    Lessons,
    trained_in,
)
from longtail.drafter.kinds import KINDS
from longtail.errors import ConfigError
from longtail.model.hf.model import load_config, load_model
from longtail.model.hf.tokenizer import load_tokenizer
from longtail.model.transformer import ModelConfig
from longtail.programs import steps
from longtail.programs.drafter_data import Corpus, generated_sequences, given_sequences
from longtail.rl.data.examples import ExampleBatches
from longtail.rl.data.prompts import fingerprint
from longtail.rl.packing import pack_sequences
from longtail.run.base_model import model_directory
from longtail.run.checkpoint import Checkpoint, RunDirectory
from longtail.run.console import Console
from longtail.system.device import DTYPES, own_engine_device
from longtail.system.interrupt import Interruption

_MEASURED_DEPTHS = 6
"""Least number of depths that are measured on held-out text; more if more are trained."""


@final
@dataclass(slots=True, kw_only=True)
class DrafterTraining(steps.Training):
    """Trainer, batches and sequences of drafter training."""

    config: DrafterTrainConfig
    trainer: LayerTrainer
    batches: ExampleBatches
    corpus: Corpus
    target: TargetIdentity
    about: tuple[str, ...]
    num_tokens: int = 0
    """Tokens trained, those before a resume included."""
    depths: DepthReport | None = None
    """Measurement after the last update; None if there is none."""

    @property
    def total_steps(self) -> int:
        """Number of updates after which training ends; sums need one pass over the sequences."""
        return self.batches.per_epoch if self._is_sum else self.config.train.steps

    @property
    def _kind(self) -> DrafterKind:
        return KINDS[self.trainer.layer.config.recipe]

    @property
    def _is_sum(self) -> bool:
        return self._kind.sums is not None

    @property
    def _num_unrolled(self) -> int:
        """Number of trained depths; a given drafter has its own recipe."""
        return self.config.drafter.unroll_steps or self._kind.num_unrolled

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restore drafter, optimizer and data cursor."""
        self.trainer.restore(checkpoint.step, checkpoint.tensors())
        self.batches.restore(checkpoint.state["cursor"])
        self.num_tokens = checkpoint.state["tokens"]

    def step(self) -> dict[str, float]:
        """Make one update and return its metrics."""
        batch = self.batches.take(crosses=not self._is_sum)
        sequences = pack_sequences(batch, self.config.train.tokens_per_micro_batch)
        report = self.trainer.step(sequences)
        self.num_tokens += report.num_tokens
        self.depths = None
        return {
            "train/loss": report.loss,
            "train/accept_len": report.depths.accept_len,
            "train/grad_norm": report.grad_norm,
            "train/learning_rate": report.learning_rate,
            "train/tokens": report.num_tokens,
        }

    def measure(self) -> dict[str, float]:
        """Measure the overlap by depth on held-out sequences."""
        if not self.corpus.heldout:
            return {}
        packed = pack_sequences(self.corpus.heldout, self.config.train.tokens_per_micro_batch)
        num_depths = max(_MEASURED_DEPTHS, self._num_unrolled)
        self.depths = depths = self.trainer.evaluate(packed, num_depths)
        overlaps = {f"heldout/overlap_{n}": each for n, each in enumerate(depths.overlap, 1)}
        return {"heldout/accept_len": depths.accept_len} | overlaps

    def save(self, directory: RunDirectory) -> None:
        """Write a checkpoint."""
        trainer, depths = self.trainer, self.depths
        record = TrainingRecord(
            steps=self.steps,
            tokens=self.num_tokens,
            unroll_steps=self._num_unrolled,
            overlap=() if depths is None else depths.overlap,
            accept_len=None if depths is None else depths.accept_len,
        )

        def save_policy(path: Path) -> None:
            LoadedDrafter(
                layer=trainer.layer,
                draft_ids=trainer.draft_ids,
                head=trainer.head,
                trained_on=self.target,
                training=record,
                sums=trainer.sums,
            ).save(path)

        state = {"cursor": self.batches.state(), "tokens": self.num_tokens}
        directory.save(self.steps, save_policy, trainer.tensors(), state)

    def lines(self, metrics: dict[str, float], *, is_due: bool) -> list[str]:
        """Return the line of a step, and that of its measurement."""
        lines = []
        if is_due:
            by_gradient = (
                f"loss {metrics['train/loss']:.4f}  "
                f"expected accept length {metrics['train/accept_len']:.2f}  "
                f"lr {metrics['train/learning_rate']:.2e}"
            )
            lines.append(
                f"{steps.step_label(self.steps, self.total_steps)}  "
                f"{by_gradient if metrics['train/grad_norm'] else 'sums of a regression'}  "
                f"{metrics['perf/tokens_per_s']:,.0f} tok/s"
            )
        return lines if self.depths is None else [*lines, f"held out: {_described(self.depths)}"]

    def log_end(self, console: Console, policy: Path) -> None:
        """Print the held-out measurement and the drafter's path on stdout."""
        if self.depths is not None:
            print(f"on held-out text, by depth: {_described(self.depths)}")
        print(f"{self.steps} steps, {self.num_tokens:,} tokens\ndrafter: {policy}")


def _described(depths: DepthReport) -> str:
    overlaps = " ".join(f"{overlap:.3f}" for overlap in depths.overlap)
    return f"overlap {overlaps}, expected accept length {depths.accept_len:.2f}"


def run(config: DrafterTrainConfig) -> int:
    """Run `longtail drafter train` from the configuration to the last checkpoint."""
    check_settings(config)
    if config.drafter.init is not None:
        check_names(config.drafter.init, field="drafter.init")
    config = decided(config)

    def build(
        directory: RunDirectory, checkpoint: Checkpoint | None, console: Console
    ) -> DrafterTraining:
        with Interruption() as interruption:
            return assemble(config, directory, checkpoint, console, interruption)

    return steps.run(config, build)


def assemble(
    config: DrafterTrainConfig,
    directory: RunDirectory,
    checkpoint: Checkpoint | None,
    console: Console,
    interruption: Interruption,
) -> DrafterTraining:
    """Build all components; ConfigError or DataError if configuration or data are invalid."""
    path = model_directory(config.target.path, console.log, field="target.path")
    tokenizer, shape = load_tokenizer(path), load_config(path)
    tokenizer.limit(shape.vocab_size)
    drafter, device = _shape(config, shape), run_device(config)

    def load_target(device: torch.device) -> Target:
        model = load_model(path, DTYPES[config.target.dtype], device)
        return Target(model=model, tokenizer=tokenizer, directory=path, name=config.target.path)

    given, init = None, config.drafter.init
    if checkpoint is None and init is not None:  # checked before the target generates sequences
        source = load_target(device)
        given = read_drafter(init, source, trained_in(source.model), field="drafter.init")
        if given is None:
            raise ConfigError(f"drafter.init = {init!r}: it has no layer to train")
        del source

    if config.data.completions == "given":
        corpus = given_sequences(config, tokenizer, directory.begun)
    else:
        home = own_engine_device(config.run.device, "run.device")
        corpus = generated_sequences(
            config, tokenizer, lambda: load_target(home).model, directory, console, interruption
        )
    target = load_target(device)
    target.model.fuse()
    if checkpoint is not None:
        given = load_drafter(checkpoint.policy, target.model, tokenizer, strict_weights=True)
    lessons = Lessons(
        config=config, target=target.model, eos_ids=tokenizer.eos_ids, sequences=corpus.training
    )
    if given is not None:
        trainer = given.kind.trainer(lessons, given.layer, given.draft_ids, given.head)
    else:
        kind = KINDS[config.drafter.recipe]
        trainer = kind.trainer(lessons, *kind.fresh(drafter, lessons), None)
    if given is not None and given.sums:
        trainer.restore(0, given.sums)
    return DrafterTraining(
        config=config,
        about=_about(config, trainer.layer, corpus),
        trainer=trainer,
        batches=ExampleBatches(
            corpus.training,
            config.train.batch_tokens,
            config.run.seed,
            {"texts": fingerprint([each.prompt_len, each.tokens] for each in corpus.training)},
        ),
        corpus=corpus,
        target=identity(target.name, target.model, tokenizer),
    )


def _about(config: DrafterTrainConfig, layer: DraftLayer, corpus: Corpus) -> tuple[str, ...]:
    """Return what is trained on what, and what is left out."""
    count = sum(parameter.numel() for parameter in layer.parameters())
    title = (
        f"{layer.config.recipe} drafter of {config.target.path}: {count:,} parameters, "
        f"{len(corpus.training)} sequences, {len(corpus.heldout)} held out"
    )
    why = f"{corpus.num_dropped} rows are left out: prompt too long, or sequence too short"
    return (title, why) if corpus.num_dropped else (title,)


def check_settings(config: DrafterTrainConfig) -> None:
    """Raise ConfigError for a recipe that is unknown, or has not what is set."""
    own = config.drafter
    if (kind := KINDS.get(own.recipe)) is None:
        raise ConfigError(f"drafter.recipe = {own.recipe!r}: give one of {', '.join(KINDS)}")
    by_gradient = ("unroll_steps",) if kind.sums is None else ()
    for name, field in DrafterSection.model_fields.items():
        known = name in ("recipe", "init", *kind.settings, *by_gradient)
        if not known and getattr(own, name) != field.default:
            raise ConfigError(
                f"drafter.{name}: drafter.recipe = {own.recipe!r} has none; leave it out"
            )
    if not by_gradient and config.train.steps != DrafterTrainSection.model_fields["steps"].default:
        raise ConfigError(
            f"train.steps: drafter.recipe = {own.recipe!r} makes one pass; leave it out"
        )


def _shape(config: DrafterTrainConfig, shape: ModelConfig) -> DraftConfig:
    """Return the shape of the drafter; ConfigError if it does not fit the target's."""
    own, name = config.drafter, config.target.path
    if own.draft_vocab_size > shape.vocab_size:
        raise ConfigError(
            f"drafter.draft_vocab_size = {own.draft_vocab_size}: {name} has {shape.vocab_size} "
            "tokens; give fewer, or 0 for all"
        )
    given = {name: getattr(own, name) for name in KINDS[own.recipe].settings}
    try:
        made: DraftConfig = KINDS[own.recipe].config(recipe=own.recipe, target=shape, **given)
    except ValueError as error:
        raise ConfigError(f"drafter.{error}") from error
    return made
