"""The configuration of `longtail sft`: one frozen tree of pydantic models.

As in `config`: the class defaults are the vetted recipe, and docstrings under fields are the help.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field

from longtail.config import files as configfile
from longtail.config.rl import (
    Amount,
    Count,
    Device,
    Generated,
    ModelSection,
    Name,
    Schedule,
    Section,
    Seed,
    Share,
    Threads,
    WriterName,
)
from longtail.system.machine import MAX_INT32


class SftDataSection(Section):
    """Prompts with the completions to imitate."""

    source: Name = "tiny-reasoner"
    """`tiny-reasoner`, a .jsonl or .parquet file, or `hf:NAME_OR_DIR[:SPLIT]`; rows hold a prompt
    and a completion, or one list of chat messages whose last is the completion."""
    size: Generated = 8192
    """Examples to generate, for generated sources; files give what they hold."""
    prompt_column: Name | None = None
    """Column with the prompt; unset tries the usual names."""
    completion_column: Name | None = None
    """Column with the completion; unset tries the usual names."""
    max_len: Annotated[int, Field(ge=2, le=MAX_INT32)] = 2048
    """Tokens of prompt and completion; a longer example is an error unless `drop_long`."""
    drop_long: bool = False
    """Leave out examples over `max_len`, with a count, instead of stopping."""


class SftTrainSection(Section):
    """Updating the model."""

    steps: Count = 400
    """Optimizer updates, those before a resume included."""
    batch_tokens: Count = 8192
    """Tokens of one update, packed, prompts included."""
    tokens_per_micro_batch: Count = 8192
    """Tokens of one forward and backward pass; a longer sequence gets a pass of its own."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-5
    """Peak of AdamW's learning rate."""
    schedule: Schedule = "cosine"
    """After warm-up; linear and cosine reach 0 at the last step."""
    warmup_steps: Amount = 20
    """Steps over which the learning rate rises linearly from 0."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW's decoupled decay, of matrices only."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients are scaled down to this global norm."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass: less memory, about a third more time."""
    autocast: bool = False
    """bfloat16 matrix products over float32 weights."""


class SftRunSection(Section):
    """The run as a whole."""

    dir: Name = "runs/sft"
    """Resolved config, metrics and checkpoints go here; the model is in `checkpoints/*/policy`."""
    seed: Seed = 0
    """Of everything drawn: example order, generated data, fresh weights."""
    device: Device = "auto"
    """`auto`, `cpu`, `cuda`, `cuda:1`."""
    threads: Threads = 0
    """Compute threads of this process; 0 takes every core."""
    log_every: Count = 10
    """Steps between lines on the terminal; metrics.jsonl gets every step."""
    checkpoint_every: Count = 100
    """Steps between checkpoints; the last step always makes one."""
    keep_checkpoints: Count = 1
    """Newest checkpoints that stay on disk."""
    resume: bool = True
    """Go on from the newest checkpoint in `dir` if there is one; off refuses a used directory."""
    writers: tuple[WriterName, ...] = ()
    """Metric writers beside metrics.jsonl, each behind the extra of its name."""


class SftConfig(Section):
    """`longtail sft` reads exactly this."""

    model: ModelSection = ModelSection()
    data: SftDataSection = SftDataSection()
    train: SftTrainSection = SftTrainSection()
    run: SftRunSection = SftRunSection()


def load(path: Path | None, overrides: Sequence[str] = ()) -> SftConfig:
    """Read the configuration; raises ConfigError with every problem found."""
    return configfile.resolve(SftConfig, path, overrides)
