"""Prompts: rows to tokenized prompts, and the order in which a run visits them.

Owns prompt ids, the length limit, the held-out share and the resumable cursor. `columns` beside it
knows the layouts of rows, `sources` reads them, and the caller passes the tokenizer.

    rows --make_prompts--> PromptSet --hold_out--> train, heldout
                                                     `--PromptSource.take--> (prompt, epoch), ...
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Any, final

from longtail.config.sections import PromptSection
from longtail.errors import ConfigError, DataError
from longtail.model.hf.chat import conversation
from longtail.model.hf.tokenizer import Tokenizer
from longtail.rl.data.columns import (
    ANSWER_COLUMNS,
    PROMPT_COLUMNS,
    find_column,
    ids_of,
    listed,
    prompt_of,
    tools_of,
    with_answer,
)
from longtail.rl.data.sources import Row, source_label
from longtail.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """Functions of a tokenizer."""

    encode: Callable[..., Sequence[int]]
    """`Tokenizer.encode`: convert text to tokens, behind special ones or behind a prompt."""
    render: Callable[..., str] | None
    """`ChatTemplate.render` with the settings of a run; None without a chat template."""
    settings: str = ""
    """Chat template and settings, as text."""

    def encode_prompt(self, text: str) -> Sequence[int]:
        """Convert a prompt; one that no chat template wrote begins with special tokens."""
        return self.encode(text, add_special_tokens=self.render is None)

    @staticmethod
    def of(
        tokenizer: Tokenizer, data: PromptSection | None = None, now: datetime | None = None
    ) -> "Encoder":
        """Return the functions of a tokenizer, with a system message and template arguments.

        `now` is the time that a chat template may write. Raises ConfigError, which names
        `data.system_prompt` or `data.chat_template_kwargs`, for what the template does not take.
        """
        system_prompt = None if data is None else data.system_prompt
        arguments = (None if data is None else data.chat_template_kwargs) or {}
        template = tokenizer.template
        if template.source is None:
            given = {"system_prompt": system_prompt, "chat_template_kwargs": arguments}
            for name, value in given.items():
                if value:
                    raise ConfigError(
                        f"data.{name} = {value!r:.80}: the tokenizer has no chat template, so "
                        "prompts are plain text; leave it out, or add the model's "
                        "chat_template.jinja"
                    )
            return Encoder(encode=tokenizer.encode, render=None)
        known = template.arguments
        if unknown := [name for name in arguments if name not in known]:
            names = f"it reads {', '.join(sorted(known))}" if known else "it reads none"
            raise ConfigError(
                f"data.chat_template_kwargs.{unknown[0]}: the tokenizer's chat template reads no "
                f"such argument; {names}"
            )
        render = partial(template.render, system_prompt=system_prompt, arguments=arguments, now=now)
        settings = json.dumps([template.source, system_prompt, arguments])
        return Encoder(encode=tokenizer.encode, render=render, settings=settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSet:
    """The prompts of one source, in the source's order."""

    source: str
    prompts: tuple[Prompt, ...]
    rows: tuple[int, ...]
    """Row of each prompt in the source, counted from 0."""
    answer_column: str | None = None
    """Column of the reference answers; None if there is none."""
    settings: str = ""
    """`Encoder.settings`."""
    num_dropped: int = 0
    """Number of rows left out because they were longer than the limit."""

    def part(self, kept: Sequence[int]) -> "PromptSet":
        """Return the prompts at the given indices."""
        return replace(
            self,
            prompts=tuple(self.prompts[index] for index in kept),
            rows=tuple(self.rows[index] for index in kept),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """A prompt set divided in two."""

    train: PromptSet
    heldout: PromptSet


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A prompt, and the number of the pass over the data in which it was visited."""

    prompt: Prompt
    epoch: int | None
    """None in an evaluation, whose noise is always the same."""


def make_prompts(
    rows: Sequence[Row],
    *,
    source: str,
    encoder: Encoder,
    max_prompt_len: int,
    drop_long: bool = False,
    prompt_column: str | None = None,
    answer_column: str | None = None,
    limit_fields: tuple[str, str] = ("data.max_prompt_len", "data.drop_long_prompts"),
    may_be_empty: bool = False,
) -> PromptSet:
    """Tokenize every row once.

    `Prompt.data` is the row with the keys `prompt` (text or chat messages of the source) and, if
    there is a reference answer, `answer`. A chat template, if there is one, formats a text as one
    user message.

    Raises `DataError` for a missing column, a prompt that is neither text nor messages, an empty
    prompt (unless an environment says more), or one longer than the limit (unless `drop_long`).
    """
    prompt_key = find_column(rows[0], prompt_column, PROMPT_COLUMNS, field="data.prompt_column")
    answer_key = find_column(rows[0], answer_column, ANSWER_COLUMNS, field="data.answer_column")
    if prompt_key is None:
        raise DataError(
            f"data.source = {source!r}: no prompt column; it has {listed(rows[0])}, one of "
            f"{', '.join(PROMPT_COLUMNS)} is expected; name yours in data.prompt_column"
        )
    ids, prompts, kept = ids_of(rows), [], []
    for index, row in enumerate(rows):
        where = f"data.source = {source!r}, row {index}"
        prompt = prompt_of(row, prompt_key, is_named=prompt_column is not None, where=where)
        data = with_answer(row, prompt, answer_key)
        text = _text(data, encoder, where=where, may_be_empty=may_be_empty)
        tokens = encode_at(where, encoder.encode_prompt, text)
        if not tokens:
            raise DataError(f"{where}: the prompt is empty")
        if len(tokens) <= max_prompt_len:
            prompt_id = f"{source_label(source)}/{ids[index]}"
            prompts.append(Prompt(prompt_id=prompt_id, tokens=tokens, text=text, data=data))
            kept.append(index)
        elif not drop_long:
            raise DataError(
                f"{where}: the prompt has {len(tokens)} tokens, {limit_fields[0]} is "
                f"{max_prompt_len}; raise it, or set {limit_fields[1]} = true to leave such rows "
                "out"
            )
    if not prompts:
        raise DataError(
            f"data.source = {source!r}: all {len(rows)} prompts are longer than "
            f"{limit_fields[0]} = {max_prompt_len}; raise it"
        )
    return PromptSet(
        source=source,
        prompts=tuple(prompts),
        rows=tuple(kept),
        answer_column=answer_key,
        settings=encoder.settings,
        num_dropped=len(rows) - len(prompts),
    )


def encode_at(where: str, encode: Callable[[str], Sequence[int]], text: str) -> tuple[int, ...]:
    """Return the tokens of a text; errors begin with `where`."""
    try:
        return tuple(encode(text))
    except ConfigError as error:
        raise DataError(f"{where}: {error}") from error


def hold_out(prompts: PromptSet, size: int) -> HeldOut:
    """Hold the last `size` prompts out. Raises `DataError` if no prompt is left to train on."""
    total = len(prompts.prompts)
    if size >= total:
        raise DataError(
            f"data.heldout_size = {size}: {prompts.source!r} has {total} prompts, none would be "
            f"left to train on; lower it, or name another source in data.heldout"
        )
    train, heldout = range(total - size), range(total - size, total)
    return HeldOut(train=prompts.part(train), heldout=prompts.part(heldout))


def fingerprint(values: Iterable[Any]) -> str:
    """Return a digest of values, equal for equal ones in every process.

    Of values that JSON cannot represent, only the type counts.
    """
    digest = hashlib.sha256()
    for value in values:
        line = json.dumps(value, skipkeys=True, default=lambda each: type(each).__name__)
        digest.update(line.encode() + b"\n")
    return digest.hexdigest()[:16]


def origin_of(rows: Iterable[Any], settings: str) -> dict[str, str]:
    """Return digests of what texts are made from, by which a resumed run knows them again.

    Tokens are not among them, because a chat template may write the date.
    """
    return {"rows": fingerprint(rows), "settings": fingerprint([settings])}


def refuse_other(saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raise DataError, with what differs, unless a checkpoint was made from the same."""
    words = {
        "rows": "other rows",
        "settings": "another chat template, or settings of it",
        "texts": "other rows, or another tokenizer",
    }
    for name, value in here.items():
        if saved.get(name) != value:
            what = f"{name} = {saved.get(name)!r}, now it is {value!r}"
            raise DataError(
                f"data.source: the run began with {words.get(name, what)}; restore the "
                "data and settings of that run, or start anew in another run.dir"
            )


class EpochCursor:
    """Visits items epoch after epoch, each epoch in an order determined by (seed, epoch).

    The cursor is therefore two numbers, from which a restored one continues exactly.
    """

    def __init__(
        self, count: int, seed: int, origin: Mapping[str, Any], *, shuffle: bool = True
    ) -> None:
        """`origin` is what the items are made from, by which a checkpoint is known again."""
        assert count, "there is an item to visit"
        self._count, self._seed, self._shuffle, self._origin = count, seed, shuffle, origin
        self._go_to(0, 0)

    def state(self) -> dict[str, Any]:
        """Return the cursor as JSON values."""
        return {**self._origin, "epoch": self._epoch, "position": self._position}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved cursor; `DataError` if it belongs to other items or settings."""
        refuse_other(state, self._origin)
        self._go_to(state["epoch"], state["position"])

    def _next(self) -> int:
        """Return the index of the item at the cursor; at an end another epoch begins."""
        if self._position == self._count:
            self._go_to(self._epoch + 1, 0)
        return self._order[self._position]

    def _go_to(self, epoch: int, position: int) -> None:
        self._epoch, self._position = epoch, position
        self._order = (
            epoch_order(self._seed, epoch, self._count) if self._shuffle else range(self._count)
        )


@final
class PromptSource(EpochCursor):
    """The prompts of a run, in the order of their visits."""

    def __init__(self, prompts: PromptSet, *, seed: int, shuffle: bool = True) -> None:
        self._prompts = prompts.prompts
        origin = {
            "num_prompts": len(prompts.prompts),
            **origin_of(([each.prompt_id, each.data] for each in self._prompts), prompts.settings),
            "seed": seed,
            "shuffle": shuffle,
        }
        super().__init__(len(prompts.prompts), seed, origin, shuffle=shuffle)

    def take(self, num_prompts: int) -> tuple[Taken, ...]:
        """Return the next prompts, crossing into new epochs as needed."""
        taken = []
        for _ in range(num_prompts):
            taken.append(Taken(prompt=self._prompts[self._next()], epoch=self._epoch))
            self._position += 1
        return tuple(taken)


def epoch_order(seed: int, epoch: int, count: int) -> Sequence[int]:
    """Return a permutation by a keyed hash, equal in every process and on every machine."""

    def draw(index: int) -> bytes:
        return hashlib.blake2b(f"{seed}/{epoch}/{index}".encode(), digest_size=8).digest()

    return sorted(range(count), key=draw)


def _text(data: Row, encoder: Encoder, *, where: str, may_be_empty: bool) -> str:
    """Return the text of a row's prompt for the model."""
    prompt, messages = data["prompt"], conversation(data["prompt"], where=where)
    if not may_be_empty and (not messages or not str(prompt).strip()):
        raise DataError(f"{where}: the prompt is empty")
    if encoder.render is None:
        if isinstance(prompt, str):
            return prompt
        raise DataError(
            f"{where}: the prompt is chat messages, but the tokenizer has no chat template; give "
            f"text prompts, or a model whose tokenizer has one"
        )
    try:
        return encoder.render(messages, tools=tools_of(data, where=where))
    except ConfigError as error:  # the template refuses the messages, or leaves some out
        raise DataError(f"{where}: {error}") from error
