"""The configuration of `longtail drafter train`: one frozen tree of pydantic models.

As in `config`: the class defaults are the vetted recipe, and docstrings under fields are the help.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from longtail.config import files as configfile
from longtail.config.rl import (
    Amount,
    Count,
    Device,
    Dtype,
    Name,
    Schedule,
    Section,
    Seed,
    Share,
    Threads,
    WriterName,
)
from longtail.system.machine import MAX_INT32

UNROLL_STEPS = {"eagle1": 2, "eagle3": 5}
"""Depths that are trained where none are asked for."""


class TargetSection(Section):
    """The model whose drafter is trained; it is only read."""

    path: Name = "tiny-reasoner"
    """Hugging Face directory, a run or checkpoint with a policy, or `tiny-reasoner`."""
    dtype: Dtype = "float32"
    """Of its weights, here; the drafter is float32 (float64 with float64)."""


class DrafterSection(Section):
    """The drafter: one decoder layer on the target's features."""

    recipe: Literal["eagle1", "eagle3"] = "eagle3"
    """`eagle3` reads three inner states and learns the target's distribution; `eagle1` reads the
    last state and learns to predict it, too."""
    layers: tuple[Annotated[int, Field(le=MAX_INT32)], ...] = ()
    """eagle3: layers of the target whose input is read, in rising order; empty takes layer 2, the
    middle one, and the third from the end."""
    window: Amount = 64
    """Tokens that the drafter attends to; 0 is all before."""
    unroll_steps: Annotated[int, Field(ge=0, le=16)] = 0
    """Depths that are trained, each on the drafter's own outputs of the one before; 0 takes 2 for
    eagle1, whose predictions then hold at any depth, and 5 for eagle3."""
    init: Name | None = None
    """Drafter to go on from, as `speculation.drafter` of train names it; its recipe, layers, window
    and vocabulary are kept, so leave those out. Unset draws a fresh one."""
    draft_vocab_size: Amount = 0
    """eagle3: tokens the drafter can propose, the commonest of the texts; 0 is all."""

    @property
    def num_unrolled(self) -> int:
        """Depths that are trained, the recipe's own if none are asked for."""
        return self.unroll_steps or UNROLL_STEPS[self.recipe]


class TextSection(Section):
    """The texts that the drafter learns."""

    source: Name = "tiny-reasoner"
    """`tiny-reasoner`, a .jsonl or .parquet file, `hf:NAME_OR_DIR[:SPLIT]`, `reasoning_gym:TASK`,
    or for `given` also a .txt file."""
    completions: Literal["generated", "given"] = "generated"
    """`generated`: the source holds prompts, and the target completes them first (what a drafter
    learns best from). `given`: rows hold prompt and completion, chat messages, or a text."""
    size: Count = 1024
    """Rows to take, at most; those beyond are left out."""
    heldout_size: Amount = 32
    """Of them, rows that are not learned but measured, off the end."""
    prompt_column: Name | None = None
    """Column with the prompt; unset tries the usual names."""
    completion_column: Name | None = None
    """given: column with the completion; unset tries the usual names."""
    text_column: Name = "text"
    """given: column with a whole text, read where a row has one."""
    max_len: Annotated[int, Field(ge=4, le=MAX_INT32)] = 4096
    """given: a longer text is cut off there."""
    max_prompt_len: Count = 512
    """generated: a longer prompt is left out, with a count."""
    max_tokens: Count = 2048
    """generated: longest completion."""
    samples: Count = 1
    """generated: completions of each prompt."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """generated: divides the logits."""
    max_running: Annotated[int, Field(ge=1, le=512)] = 64
    """generated: requests at the same time."""


class DrafterTrainSection(Section):
    """Updating the drafter."""

    steps: Count = 400
    """Optimizer updates, those before a resume included."""
    batch_tokens: Count = 1024
    """Tokens of one update, packed, prompts included."""
    tokens_per_micro_batch: Count = 4096
    """Tokens of one forward and backward pass; a longer text gets a pass of its own."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-2
    """Peak of AdamW's learning rate; with `matrix_rate`, of the norms' alone."""
    matrix_rate: Annotated[float, Field(ge=0)] = 0.03
    """Peak of Muon's learning rate of the matrices; 0 learns them by AdamW, too (then
    `learning_rate` wants to be about 1e-3 or less)."""
    schedule: Schedule = "cosine"
    """After warm-up; linear and cosine reach 0 at the last step."""
    warmup_steps: Amount = 10
    """Steps over which the learning rate rises linearly from 0."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled decay, of matrices only."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients of AdamW's part are scaled down to this global norm."""
    autocast: bool = False
    """bfloat16 matrix products over float32 weights."""


class DrafterRunSection(Section):
    """The run as a whole."""

    dir: Name = "runs/drafter"
    """Resolved config, texts, metrics and checkpoints; the drafter is in `checkpoints/*/policy`."""
    seed: Seed = 0
    """Of everything drawn: generated data, sampling noise, fresh weights, the order of texts."""
    device: Device = "auto"
    """`auto`, `cpu`, `cuda`, `cuda:1`."""
    threads: Threads = 0
    """Compute threads of this process; 0 takes every core."""
    log_every: Count = 10
    """Steps between lines on the terminal; metrics.jsonl gets every step."""
    checkpoint_every: Count = 100
    """Steps between checkpoints and measurements; the last step always makes both."""
    keep_checkpoints: Count = 1
    """Newest checkpoints that stay on disk."""
    resume: bool = True
    """Go on from the newest checkpoint in `dir` if there is one; off refuses a used directory."""
    writers: tuple[WriterName, ...] = ()
    """Metric writers beside metrics.jsonl, each behind the extra of its name."""


class DrafterTrainConfig(Section):
    """`longtail drafter train` reads exactly this."""

    target: TargetSection = TargetSection()
    drafter: DrafterSection = DrafterSection()
    data: TextSection = TextSection()
    train: DrafterTrainSection = DrafterTrainSection()
    run: DrafterRunSection = DrafterRunSection()

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> "DrafterTrainConfig":
        problems = list(_problems(self))
        if problems:
            raise ValueError("\n".join(problems))
        return self


def load(path: Path | None, overrides: Sequence[str] = ()) -> DrafterTrainConfig:
    """Read the configuration; raises ConfigError with every problem found."""
    return configfile.resolve(DrafterTrainConfig, path, overrides)


def _problems(config: DrafterTrainConfig) -> Iterator[str]:
    own, data = config.drafter, config.data
    given = own.model_fields_set & {"recipe", "layers", "window", "draft_vocab_size"}
    if own.init is not None and given:
        yield f"drafter.{min(given)}: drafter.init brings its own; leave it out"
    if own.recipe == "eagle1" and (own.layers or own.draft_vocab_size):
        field = "layers" if own.layers else "draft_vocab_size"
        yield f"drafter.{field}: only drafter.recipe = 'eagle3' has it; leave it out"
    if any(later <= earlier for earlier, later in zip(own.layers, own.layers[1:], strict=False)):
        yield f"drafter.layers = {list(own.layers)}: they must be in rising order"
    if any(layer < 0 for layer in own.layers):
        yield f"drafter.layers = {list(own.layers)}: layers count from 0"
    if data.heldout_size >= data.size:
        yield (
            f"data.heldout_size = {data.heldout_size}: it is taken off the {data.size} rows of "
            "data.size, and none would be left to learn"
        )
    if data.completions == "generated" and data.source.endswith(".txt"):
        yield (
            f"data.source = {data.source!r}: a text file holds no prompts; set data.completions = "
            "'given'"
        )
