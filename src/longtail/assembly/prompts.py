"""Prompts of a training run: from the data section of its configuration to tokenized prompts."""

from collections.abc import Callable
from functools import partial

from longtail.config.rl import DataSection, RunConfig
from longtail.errors import ConfigError
from longtail.model.hf.tokenizer import Tokenizer
from longtail.rl.data.prompts import (
    Encoder,
    HeldOut,
    Messages,
    PromptSet,
    hold_out,
    make_prompts,
    system_first,
)
from longtail.rl.data.sources import EMBEDDED, HELDOUT, load_rows
from longtail.rl.grading.pool import Check, gradable


def load_prompts(
    config: RunConfig,
    tokenizer: Tokenizer,
    check: Check | None,
    log: Callable[[str], None] = lambda line: None,
) -> HeldOut:
    """Load the training prompts and the held-out prompts, of which there may be none.

    `check` finds the rows that the reward cannot grade; None: nothing is graded. What is left out
    is logged. Raises ConfigError or DataError, naming the field, for anything that does not fit.
    """
    data, encoder = config.data, _encoder(config.data, tokenizer)

    def load(source: str, size: int, field: str) -> PromptSet:
        prompts = make_prompts(
            load_rows(source, size, config.run.seed, field=field),
            source=source,
            encoder=encoder,
            max_prompt_len=data.max_prompt_len,
            drop_long=data.drop_long_prompts,
            prompt_column=data.prompt_column,
            answer_column=data.answer_column,
        )
        if prompts.num_dropped:
            log(
                f"{source}: {prompts.num_dropped} prompts over {data.max_prompt_len} tokens are "
                "left out (data.drop_long_prompts)"
            )
        if check is not None:
            prompts = gradable(prompts, config.reward.name, check, drop=data.drop_ungradable)
        if prompts.num_ungradable:
            log(f"{source}: {prompts.num_ungradable} prompts are left out (data.drop_ungradable)")
        return prompts

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


def _encoder(data: DataSection, tokenizer: Tokenizer) -> Encoder:
    """Return the tokenizer's functions, with the configured system message and arguments."""
    if not tokenizer.has_chat_template:
        for name in ("system_prompt", "chat_template_kwargs"):
            if value := getattr(data, name):
                raise ConfigError(
                    f"data.{name} = {value!r:.80}: the tokenizer has no chat template, so prompts "
                    "are plain text; leave it out, or add the model's chat_template.jinja"
                )
        return Encoder(encode=tokenizer.encode, render=None)
    known = tokenizer.template_arguments
    arguments = data.chat_template_kwargs or {}
    for name in arguments:
        if name not in known:
            names = f"it reads {', '.join(sorted(known))}" if known else "it reads none"
            raise ConfigError(
                f"data.chat_template_kwargs.{name}: the tokenizer's chat template reads no such "
                f"argument; {names}"
            )
    render: Callable[[Messages], str] = partial(tokenizer.render, arguments=arguments)
    if data.system_prompt is not None:
        render = system_first(render, data.system_prompt)
    return Encoder(encode=tokenizer.encode, render=render)
