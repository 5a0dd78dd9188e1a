"""Prompts of a training run: from the data section of its configuration to tokenized prompts."""

from collections.abc import Callable, Sequence
from dataclasses import replace
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
from longtail.rl.data.sources import EMBEDDED, HELDOUT, Row, load_rows
from longtail.rl.grading.pool import Check, gradable


def load_prompts(config: RunConfig, tokenizer: Tokenizer, check: Check | None) -> HeldOut:
    """Load the training prompts and the held-out prompts, of which there may be none.

    `check` finds the rows that the reward cannot grade; None: nothing is graded. Raises ConfigError
    or DataError, naming the field, for anything that does not fit.
    """
    data, seed = config.data, config.run.seed
    encoder = _encoder(data, tokenizer)

    def prepare(rows: Sequence[Row], source: str) -> PromptSet:
        prompts = make_prompts(
            rows,
            source=source,
            encoder=encoder,
            max_prompt_len=data.max_prompt_len,
            drop_long=data.drop_long_prompts,
            prompt_column=data.prompt_column,
            answer_column=data.answer_column,
        )
        if check is None:
            return prompts
        return gradable(prompts, config.reward.name, check, drop=data.drop_ungradable)

    def load(source: str, size: int, field: str) -> PromptSet:
        return prepare(load_rows(source, size, seed, field=field), source)

    heldout = data.heldout
    if heldout is None and data.source == EMBEDDED:
        heldout = data.source + HELDOUT  # disjoint by construction
    none = PromptSet(source=data.source, prompts=(), rows=())
    everything = load(data.source, data.size, "data.source")
    size = data.heldout_size if heldout is None else 0
    parts = hold_out(everything, size) if size else HeldOut(train=everything, heldout=none)
    if heldout is None or data.heldout_size == 0:
        return parts
    held = load(heldout, data.heldout_size, "data.heldout")
    size = min(data.heldout_size, len(held.prompts))
    return replace(parts, heldout=held.part(range(size)))


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
