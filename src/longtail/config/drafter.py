"""Configuration of `longtail drafter train`: one frozen tree of pydantic models."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, model_validator

from longtail.config.rl import RUNNING_SUMS
from longtail.config.sections import (
    Amount,
    Count,
    Dtype,
    Generated,
    HeldOut,
    Name,
    NotNegative,
    OptimizerSection,
    Positive,
    PromptSection,
    Samples,
    Schedule,
    Section,
    SupervisedRunSection,
    Temperature,
)
from longtail.system.machine import MAX_INT32

Slots = Annotated[int, Field(ge=1, le=16)]


class TargetSection(Section):
    """The model that the drafter drafts for; its weights do not change."""

    path: Name = "smollm2"
    """Model, named as in `model.path` of train."""
    dtype: Dtype = "auto"
    """Type of the target's weights, `auto` as in `rollout.dtype` of train; the drafter is float32
    (float64 with float64)."""


class DrafterSection(Section):
    """The drafter: a layer on the target's features."""

    recipe: Name = "eagle3"
    """`eagle3` reads three hidden states and learns the target's distribution; `eagle1` reads the
    last hidden state and learns to predict the next one, too; `ridge` predicts the states of a
    block of tokens by least squares, from one pass over the data and without a step size."""
    slots: Slots = 6
    """ridge: number of tokens of a block."""
    layers: tuple[Annotated[int, Field(le=MAX_INT32)], ...] = ()
    """eagle3: layers of the target whose input is read, in rising order; empty uses layer 2, the
    middle one, and the third from the end."""
    window: Amount = 64
    """Number of tokens that the drafter attends to; 0 is unlimited."""
    unroll_steps: Annotated[int, Field(ge=0, le=16)] = 0
    """Number of trained depths, each on the drafter's own outputs of the depth before; 0 uses 2
    for eagle1, whose predictions then hold at any depth, and 5 for eagle3."""
    init: Name | None = None
    """Drafter to start from, named as in `speculation.drafter` of train; its recipe, layers, window
    and vocabulary are kept, so leave those out. Unset starts from fresh weights."""
    draft_vocab_size: Amount = 0
    """Number of tokens the drafter can propose, the most frequent ones of the data; 0 is the whole
    vocabulary. `ridge` proposes what occurs in the completions."""


class TextSection(PromptSection):
    """Sequences that the drafter learns from."""

    source: Name = RUNNING_SUMS
    """`running_sums`, a .jsonl or .parquet file, `hf:NAME_OR_DIR[:SPLIT]` or
    `reasoning_gym:TASK`."""
    completions: Literal["generated", "given"] = "generated"
    """`generated`: the source holds prompts, and the target completes them first (best for a
    drafter). `given`: rows hold prompt and completion, chat messages, or a text."""
    size: Generated = 1024
    """Largest number of rows to use."""
    heldout_size: HeldOut = 32
    """Number of these rows, the last ones, that are held out to measure the drafter."""
    completion_column: Name | None = None
    """given: column with the completion; unset tries the usual names."""
    text_column: Name = "text"
    """given: column with a whole text, read where a row has one."""
    max_len: Annotated[int, Field(ge=4, le=MAX_INT32)] = 4096
    """given: longest sequence in tokens; longer ones are cut."""
    max_prompt_len: Count = 512
    """generated: longest prompt in tokens; longer prompts are left out and counted."""
    max_tokens: Count = 2048
    """generated: longest completion in tokens."""
    samples: Samples = 1
    """generated: number of completions per prompt."""
    temperature: Temperature = 1.0
    """generated: sampling temperature."""
    max_running: Annotated[int, Field(ge=1, le=512)] = 64
    """generated: largest number of requests that generate at the same time."""


class DrafterTrainSection(OptimizerSection):
    """Updates of the drafter."""

    steps: Count = 400
    """Number of optimizer updates, those before a resume included; `ridge` makes one pass over the
    data."""
    batch_tokens: Count = 1024
    """Tokens of one update, packed, prompts included."""
    tokens_per_micro_batch: Count = 4096
    """Tokens of one forward and backward pass; a longer sequence gets a pass of its own."""
    learning_rate: Positive = 1e-2
    """Peak learning rate of AdamW; of the norms alone unless `matrix_rate` is 0."""
    matrix_rate: NotNegative = 0.03
    """Peak learning rate of Muon, for the matrices; 0 uses AdamW for them, too (then set
    `learning_rate` to 1e-3 or less)."""
    schedule: Schedule = "cosine"
    """Learning rate after warm-up; linear and cosine reach 0 at the last step."""
    warmup_steps: Amount = 10
    """Number of steps in which the learning rate rises linearly from 0."""
    max_grad_norm: Positive = 1.0
    """Global norm to which larger gradients of AdamW's parameters are scaled down."""


class DrafterRunSection(SupervisedRunSection):
    """The run as a whole."""

    dir: Name = "runs/drafter"
    """Directory of config, sequences, metrics and checkpoints; the drafter is in
    `checkpoints/*/policy`."""


class DrafterTrainConfig(Section):
    """The whole configuration of `longtail drafter train`."""

    target: TargetSection = TargetSection()
    drafter: DrafterSection = DrafterSection()
    data: TextSection = TextSection()
    train: DrafterTrainSection = DrafterTrainSection()
    run: DrafterRunSection = DrafterRunSection()

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> "DrafterTrainConfig":
        if problems := list(_problems(self)):
            raise ValueError("\n".join(problems))
        return self


def _problems(config: DrafterTrainConfig) -> Iterator[str]:
    drafter, data = config.drafter, config.data

    def differs(name: str) -> bool:
        return bool(getattr(drafter, name) != DrafterSection.model_fields[name].default)

    given = list(filter(differs, ("draft_vocab_size", "layers", "recipe", "window")))
    if drafter.init is not None and given:
        yield f"drafter.{given[0]}: drafter.init brings its own; leave it out"
    if any(b <= a for a, b in zip(drafter.layers, drafter.layers[1:], strict=False)):
        yield f"drafter.layers = {list(drafter.layers)}: they must be in rising order"
    if any(layer < 0 for layer in drafter.layers):
        yield f"drafter.layers = {list(drafter.layers)}: layers count from 0"
    if data.heldout_size >= data.size:
        yield (
            f"data.heldout_size = {data.heldout_size}: data.size = {data.size} rows include the "
            "held-out ones, and none would be left to learn"
        )
