"""Configuration of `longtail sft`: one frozen tree of pydantic models."""

from typing import Annotated

from pydantic import Field

from longtail.config.rl import RUNNING_SUMS
from longtail.config.sections import (
    Amount,
    Count,
    Generated,
    ModelSection,
    Name,
    OptimizerSection,
    Positive,
    PromptSection,
    Schedule,
    Section,
    SupervisedRunSection,
)
from longtail.system.machine import MAX_INT32


class SftDataSection(PromptSection):
    """Prompts with the completions to imitate."""

    source: Name = RUNNING_SUMS
    """A .jsonl or .parquet file, `hf:NAME_OR_DIR[:SPLIT]`, or `running_sums`; a row holds
    a prompt and a completion, or one list of chat messages whose last is the completion."""
    size: Generated = 8192
    """Number of examples of a generated source; files give all their rows."""
    completion_column: Name | None = None
    """Column with the completion; unset tries the usual names."""
    max_len: Annotated[int, Field(ge=2, le=MAX_INT32)] = 2048
    """Longest prompt with completion, in tokens; a longer one is an error unless `drop_long`."""
    drop_long: bool = False
    """Whether to leave out and count examples over `max_len` instead of stopping."""


class SftTrainSection(OptimizerSection):
    """Updates of the model."""

    steps: Count = 400
    """Number of optimizer updates, those before a resume included."""
    batch_tokens: Count = 8192
    """Tokens of one update, packed, prompts included."""
    tokens_per_micro_batch: Count = 8192
    """Tokens of one forward and backward pass; a longer sequence gets a pass of its own."""
    learning_rate: Positive = 1e-5
    """Peak learning rate of AdamW."""
    schedule: Schedule = "cosine"
    """Learning rate after warm-up; linear and cosine reach 0 at the last step."""
    warmup_steps: Amount = 20
    """Number of steps in which the learning rate rises linearly from 0."""
    gradient_checkpointing: bool = False
    """Whether the backward pass recomputes activations; on a CPU, those without free memory."""


class SftRunSection(SupervisedRunSection):
    """The run as a whole."""

    dir: Name = "runs/sft"
    """Directory of config, metrics and checkpoints; the model is in `checkpoints/*/policy`."""


class SftConfig(Section):
    """The whole configuration of `longtail sft`."""

    model: ModelSection = ModelSection()
    data: SftDataSection = SftDataSection()
    train: SftTrainSection = SftTrainSection()
    run: SftRunSection = SftRunSection()
