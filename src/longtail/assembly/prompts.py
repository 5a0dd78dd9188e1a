"""Prompts of a training run: from the data section of its configuration to tokenized prompts."""

from collections.abc import Callable
from datetime import datetime

from longtail.config.rl import RunConfig
from longtail.model.hf.tokenizer import Tokenizer
from longtail.rl.data.prompts import Encoder, HeldOut, PromptSet, hold_out, make_prompts
from longtail.rl.data.sources import EMBEDDED, HELDOUT, load_rows
from longtail.rl.grading.pool import Check, gradable


def load_prompts(
    config: RunConfig,
    tokenizer: Tokenizer,
    check: Check | None,
    log: Callable[[str], None] = lambda line: None,
    now: datetime | None = None,
) -> HeldOut:
    """Load the training prompts and the held-out prompts, of which there may be none.

    `check` finds the rows that the reward cannot grade; None: nothing is graded. What is left out
    is logged. `now` is the time that a chat template may write. Raises ConfigError or DataError,
    naming the field, for anything that does not fit.
    """
    data = config.data
    encoder = Encoder.of(tokenizer, data, now)

    def load(source: str, size: int, field: str) -> PromptSet:
        prompts = make_prompts(
            load_rows(source, size, config.run.seed, field=field),
            source=source,
            encoder=encoder,
            max_prompt_len=data.max_prompt_len,
            drop_long=data.drop_long_prompts,
            prompt_column=data.prompt_column,
            answer_column=data.answer_column,
            may_be_empty=config.environment.name is not None,
        )
        if prompts.num_dropped:
            log(
                f"{source}: {prompts.num_dropped} prompts over {data.max_prompt_len} tokens are "
                "left out (data.drop_long_prompts)"
            )
        if check is None:
            return prompts
        kept = gradable(prompts, config.reward.name, check, drop=data.drop_ungradable)
        if count := len(prompts.prompts) - len(kept.prompts):
            log(f"{source}: {count} prompts are left out (data.drop_ungradable)")
        return kept

    other = data.heldout
    if other is None and data.source == EMBEDDED:
        other = data.source + HELDOUT  # disjoint by construction
    train, size = load(data.source, data.size, "data.source"), data.heldout_size
    if other is None and size:
        return hold_out(train, size)
    heldout = PromptSet(source=data.source, prompts=(), rows=())
    if other is not None and size:
        heldout = load(other, size, "data.heldout")
        heldout = heldout.part(range(min(size, len(heldout.prompts))))
    return HeldOut(train=train, heldout=heldout)
