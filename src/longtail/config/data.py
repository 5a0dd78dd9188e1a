"""Sections `data` and `reward` of the configuration of `longtail train`."""

from typing import Literal

from longtail.config.sections import (
    Amount,
    Count,
    Generated,
    Name,
    Processes,
    Seconds,
    Section,
    Table,
)

REASONING_GYM = "reasoning_gym"
RUNNING_SUMS = "running_sums"


class DataSection(Section):
    """Prompts to train on, and held-out prompts."""

    source: Name = RUNNING_SUMS
    """A .jsonl or .parquet file, `hf:OWNER/NAME[/CONFIG][:SPLIT]` (a dataset of the hub),
    `hf:DIR[:SPLIT]`, `reasoning_gym:TASK`, `reasoning_gym:FILE.yaml` (a mixture of tasks, as its
    CompositeConfig), or `running_sums` (additions of several numbers)."""
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
