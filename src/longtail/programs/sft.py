"""Supervised fine-tuning, the program behind `longtail sft`.

It builds the components (`rl.data.examples`, `rl.sft_learner`) from a configuration; the loop is
`programs.steps`. The run directory and its checkpoints are those of `longtail train`; the model is
in the newest checkpoint's `policy`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import final

import torch

from longtail.assembly.precision import decided, run_device
from longtail.config.rl import RUNNING_SUMS
from longtail.config.sft import SftConfig
from longtail.errors import ConfigError
from longtail.model.hf.model import PolicyTransformer, load_model
from longtail.model.hf.tokenizer import Tokenizer, load_tokenizer
from longtail.programs import steps
from longtail.rl.data import sum_task
from longtail.rl.data.examples import Example, ExampleBatches, make_examples
from longtail.rl.data.prompts import Encoder, origin_of
from longtail.rl.data.sources import Row, load_rows
from longtail.rl.sft_learner import SftLearner
from longtail.run.base_model import model_directory
from longtail.run.checkpoint import Checkpoint, RunDirectory
from longtail.run.console import Console

_HELDOUT_ONE_IN, _MAX_HELDOUT = 20, 64
"""One example in 20, and at most 64, are held out."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FineTuning(steps.Training):
    """Model, learner and examples of fine-tuning."""

    config: SftConfig
    model: PolicyTransformer
    tokenizer: Tokenizer
    trainer: SftLearner
    batches: ExampleBatches
    heldout: tuple[Example, ...]
    about: tuple[str, ...]

    @property
    def total_steps(self) -> int:
        """Number of updates after which training ends."""
        return self.config.train.steps

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restore model, optimizer and data cursor."""
        saved = self.model.read(checkpoint.policy)
        self.trainer.restore(checkpoint.step, checkpoint.tensors(), saved)
        self.batches.restore(checkpoint.state["cursor"])

    def step(self) -> dict[str, float]:
        """Make one update and return its metrics."""
        return self.trainer.step(self.batches.take())

    def measure(self) -> dict[str, float]:
        """Measure the loss on held-out examples."""
        return {"heldout/loss": self.trainer.loss(self.heldout)} if self.heldout else {}

    def save(self, directory: RunDirectory) -> None:
        """Write a checkpoint."""

        def save_policy(path: Path) -> None:
            self.model.save(path, self.tokenizer.eos_ids, self.tokenizer.bos_id)
            self.tokenizer.save(path)

        state = {"cursor": self.batches.state()}
        directory.save(self.steps, save_policy, self.trainer.tensors(), state)

    def lines(self, metrics: dict[str, float], *, is_due: bool) -> list[str]:
        """Return the line of a step."""
        heldout = metrics.get("heldout/loss", math.nan)
        line = (
            f"{steps.step_label(self.steps, self.total_steps)}  "
            f"loss {metrics['train/loss']:.4f}  "
            + (f"held out {heldout:.4f}  " if math.isfinite(heldout) else "")
            + f"entropy {metrics['train/entropy']:.3f}  lr {metrics['train/learning_rate']:.2e}  "
            f"{metrics['perf/tokens_per_s']:,.0f} tok/s"
        )
        return [line] if is_due else []

    def log_end(self, console: Console, policy: Path) -> None:
        """Print the path of the model."""
        console.log(f"the model is in {policy}")


def run(config: SftConfig) -> int:
    """Run `longtail sft` from the configuration to the last checkpoint; 130 if interrupted."""
    config = decided(config)
    return steps.run(config, lambda directory, *_: assemble(config, directory.begun))


def assemble(config: SftConfig, now: datetime | None = None) -> FineTuning:
    """Build all components; ConfigError or DataError if configuration or data are invalid.

    `now` is the time that a chat template may write.
    """
    device, path = run_device(config), model_directory(config.model.path)
    model, tokenizer = load_model(path, torch.float32, device), load_tokenizer(path)
    tokenizer.limit(model.config.vocab_size)
    if config.data.max_len > model.config.max_positions:
        raise ConfigError(
            f"data.max_len = {config.data.max_len}: the model has {model.config.max_positions} "
            "positions; lower it"
        )
    encoder = Encoder.of(tokenizer, config.data, now)
    examples, num_dropped, origin = _examples(config, tokenizer, encoder)
    cut = len(examples) - min(_MAX_HELDOUT, len(examples) // _HELDOUT_ONE_IN)
    own, parameters = config.train, sum(p.numel() for p in model.parameters())
    over = f"examples over {config.data.max_len} tokens are left out (data.drop_long)"
    return FineTuning(
        config=config,
        model=model,
        tokenizer=tokenizer,
        trainer=SftLearner(model, own),
        batches=ExampleBatches(examples[:cut], own.batch_tokens, config.run.seed, origin),
        heldout=tuple(examples[cut:]),
        about=(
            f"{config.model.path}: {parameters:,} parameters, {config.data.source}",
            *([f"{num_dropped} {over}"] if num_dropped else []),
        ),
    )


def _examples(
    config: SftConfig, tokenizer: Tokenizer, encoder: Encoder
) -> tuple[list[Example], int, dict[str, str]]:
    data = config.data
    rows: Sequence[Row] = (
        sum_task.examples(data.size, config.run.seed)
        if data.source == RUNNING_SUMS
        else load_rows(data.source, data.size, config.run.seed)
    )
    if not tokenizer.eos_ids:
        raise ConfigError(
            f"model.path = {config.model.path!r}: its tokenizer has no end-of-text token; set "
            "eos_token in tokenizer_config.json"
        )
    examples, num_dropped = make_examples(
        rows,
        source=data.source,
        encoder=encoder,
        ends=tokenizer.ends,
        max_len=data.max_len,
        drop_long=data.drop_long,
        prompt_column=data.prompt_column,
        completion_column=data.completion_column,
    )
    return examples, num_dropped, origin_of(rows, encoder.settings)
