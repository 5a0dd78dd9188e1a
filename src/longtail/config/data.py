"""Sections `data` and `reward` of the configuration of `longtail train`."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from longtail.config.sections import (
    Amount,
    Count,
    Generated,
    Name,
    Positive,
    Processes,
    Seconds,
    Section,
    Table,
)

REASONING_GYM = "reasoning_gym"
RUNNING_SUMS = "running_sums"


class CurriculumTable(Section):
    """Rising levels of a task."""

    max_level: Annotated[int, Field(ge=1, le=1000)]
    """Highest level; problems of all levels are made at the start."""
    raise_at: Annotated[float, Field(gt=0)] = 0.8
    """Mean reward of the last `groups` groups at which the level rises by one."""
    groups: Count = 32
    """Number of groups of the present level that the mean is over."""


class TaskTable(Section):
    """One task of a mixture."""

    name: Name
    """Name of a reasoning-gym task."""
    weight: Positive = 1.0
    """Share of the prompts, relative to the other weights."""
    config: Table | None = None
    """Parameters of the task, as {min_terms = 2, max_terms = 3}."""
    level: Annotated[int, Field(ge=0, le=1000)] | None = None
    """Level of the task's own curriculum; unset keeps the task's defaults, or begins at 0 with
    `curriculum`."""
    curriculum: CurriculumTable | None = None
    """Raises the level while the run learns."""

    @property
    def levels(self) -> tuple[int, ...]:
        """Levels whose problems a run may visit; empty without a level."""
        if self.curriculum is not None:
            return tuple(range(self.level or 0, self.curriculum.max_level + 1))
        return () if self.level is None else (self.level,)


class DataSection(Section):
    """Prompts to train on, and held-out prompts."""

    source: Name = RUNNING_SUMS
    """A .jsonl or .parquet file, `hf:OWNER/NAME[/CONFIG][:SPLIT]` (a dataset of the hub),
    `hf:DIR[:SPLIT]`, `reasoning_gym:TASK`, `reasoning_gym` with `tasks`, or `running_sums`
    (additions of several numbers)."""
    tasks: tuple[TaskTable, ...] = ()
    """Mixture of reasoning-gym tasks, instead of `source`; in a file as tables [[data.tasks]], on
    the command line as '[{name = "chain_sum", weight = 2}, {name = "gcd"}]'."""
    heldout: Name | None = None
    """Source of held-out prompts, in the same forms; unset uses the last `heldout_size` rows of
    `source`, or generates others for `running_sums`."""
    heldout_size: Amount = 64
    """Number of held-out prompts, for the evaluation before and after."""
    size: Generated = 2048
    """Number of prompts of a generated source; files give all their rows."""
    prompt_column: Name | None = None
    """Column with the prompt (text or chat messages); unset tries TRL's and verl's names."""
    answer_column: Name | None = None
    """Column with the reference answer; unset tries TRL's and verl's names."""
    system_prompt: Name | None = None
    """System message before each prompt, through the tokenizer's chat template; chat messages that
    begin with one of their own keep it."""
    chat_template_kwargs: Table | None = None
    """Arguments of the tokenizer's chat template, as {enable_thinking = false}."""
    max_prompt_len: Count = 512
    """Longest prompt in tokens, chat template applied; a longer one is an error unless
    `drop_long_prompts`."""
    drop_long_prompts: bool = False
    """Whether to leave out and count prompts over `max_prompt_len` instead of stopping."""
    drop_ungradable: bool = False
    """Whether to leave out and count rows whose reference answer the reward cannot use."""
    shuffle: bool = True
    """Whether prompts come in a new order each epoch, drawn from the run's seed."""

    @property
    def own_reward(self) -> str | None:
        """Reward that belongs to the source; None for one that has none."""
        is_gym = self.source.partition(":")[0] == REASONING_GYM
        return REASONING_GYM if is_gym else None


class RewardSection(Section):
    """Grading of completions."""

    name: Name = "last_number"
    """`exact`, `last_number` (the completion's last number equals the answer), `math_verify`,
    `reasoning_gym`, or `module:function` as in TRL. Unset, problems of reasoning-gym have
    `reasoning_gym`."""
    per: Literal["completion", "group"] = "completion"
    """Completions that `module:function` gets in one call: one, so that a failure excludes no
    other; or all of a prompt, to compare them."""
    timeout_s: Seconds = 10.0
    """Most seconds per call; a slower grader is killed and its rollouts excluded."""
    workers: Processes = 1
    """Number of grader processes."""


def data_problems(data: DataSection) -> Iterator[str]:
    """Yield what does not fit together in a data section."""
    if data.tasks and data.source != REASONING_GYM:
        yield (
            f"data.source = {data.source!r}: data.tasks names other prompts; leave one of the two "
            "out"
        )
    if data.source == REASONING_GYM and not data.tasks:
        yield (
            "data.source = 'reasoning_gym': no task is named; add [[data.tasks]] tables, or name "
            "one as reasoning_gym:TASK"
        )
    names = [task.name for task in data.tasks]
    for index, task in enumerate(data.tasks):
        if task.name in names[:index]:
            yield (
                f"data.tasks[{index}].name = {task.name!r}: the task is there twice; give one "
                "table with wider parameters, or with a curriculum"
            )
        if task.curriculum is not None and len(task.levels) < 2:
            yield (
                f"data.tasks[{index}].level = {task.level}: it must be less than "
                f"curriculum.max_level = {task.curriculum.max_level}"
            )
