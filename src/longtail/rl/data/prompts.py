"""Prompts: rows to tokenized prompts, and the order in which a run visits them.

Owns column layouts (TRL's, verl's, or the user's own), prompt ids, the length limit, the held-out
share and the resumable cursor. `longtail.rl.data.sources` reads rows, and the caller passes the
tokenizer.

    rows --make_prompts--> PromptSet --hold_out--> train, heldout
                                                     `--PromptSource.take--> (prompt, epoch), ...
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

from longtail.errors import ConfigError, DataError, did_you_mean
from longtail.model.hf.tokenizer import Tokenizer
from longtail.rl.data.sources import Row, source_label
from longtail.types import Prompt

PROMPT_COLUMNS = ("prompt", "question", "problem", "query", "input")
"""Prompt columns in order of preference, for unset `data.prompt_column`."""

ANSWER_COLUMNS = ("answer", "ground_truth", "solution", "final_answer", "target", "reward_model")
"""Answer columns in order of preference, for unset `data.answer_column`; verl: the last."""

ID_COLUMNS = ("prompt_id", "problem_id", "id", "uid")
"""Columns whose values, if they are unique, become ids."""

_MAX_LISTED = 20
"""Most columns that an error lists."""

Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """Functions of a tokenizer."""

    encode: Callable[..., Sequence[int]]
    """`Tokenizer.encode`: convert text to tokens, behind special ones or behind a prompt."""
    render: Callable[[Messages], str] | None
    """Convert chat messages to text with the generation prompt; None without a chat template."""

    def encode_prompt(self, text: str) -> Sequence[int]:
        """Convert a prompt; one that no chat template wrote begins with special tokens."""
        return self.encode(text, add_special_tokens=self.render is None)

    @staticmethod
    def of(
        tokenizer: Tokenizer,
        system_prompt: str | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> "Encoder":
        """Return the functions of a tokenizer, with a system message and template arguments.

        Raises ConfigError, which names `data.system_prompt` or `data.chat_template_kwargs`, for
        what the chat template does not take.
        """
        given = {"system_prompt": system_prompt, "chat_template_kwargs": arguments}
        if not tokenizer.has_chat_template:
            for name, value in given.items():
                if value:
                    raise ConfigError(
                        f"data.{name} = {value!r:.80}: the tokenizer has no chat template, so "
                        "prompts are plain text; leave it out, or add the model's "
                        "chat_template.jinja"
                    )
            return Encoder(encode=tokenizer.encode, render=None)
        known = tokenizer.template.arguments
        if unknown := [name for name in arguments or {} if name not in known]:
            names = f"it reads {', '.join(sorted(known))}" if known else "it reads none"
            raise ConfigError(
                f"data.chat_template_kwargs.{unknown[0]}: the tokenizer's chat template reads no "
                f"such argument; {names}"
            )
        render: Callable[[Messages], str] = partial(
            tokenizer.template.render, arguments=arguments or {}
        )
        if system_prompt is not None:
            render = system_first(render, system_prompt)
        return Encoder(encode=tokenizer.encode, render=render)


def system_first(
    render: Callable[[Messages], str], system_prompt: str
) -> Callable[[Messages], str]:
    """Return `render` with a system message before the others.

    Messages that begin with a system message of their own keep it. The result raises `DataError` if
    the chat template leaves the system message out.
    """

    def rendered(messages: Messages) -> str:
        if messages[0]["role"] == "system":
            return render(messages)
        text = render([{"role": "system", "content": system_prompt}, *messages])
        if system_prompt.strip() not in text:
            raise DataError(
                f"data.system_prompt = {system_prompt!r:.80}: the tokenizer's chat template leaves "
                "system messages out; write it into the prompts instead"
            )
        return text

    return rendered


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSet:
    """The prompts of one source, in the source's order."""

    source: str
    prompts: tuple[Prompt, ...]
    rows: tuple[int, ...]
    """Row of each prompt in the source, counted from 0."""
    answer_column: str | None = None
    """Column of the reference answers; None if there is none."""
    num_dropped: int = 0
    """Number of rows left out because they were longer than the limit."""
    num_ungradable: int = 0
    """Number of rows left out because their completions cannot be graded."""

    def part(self, kept: Sequence[int]) -> "PromptSet":
        """Return the prompts at the given indices, with the counts of rows left out before."""
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
    epoch: int


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
) -> PromptSet:
    """Tokenize every row once.

    `Prompt.data` is the row with the keys `prompt` (text or chat messages of the source) and, if
    there is a reference answer, `answer`. A chat template, if there is one, formats a text as one
    user message.

    Raises `DataError` for a missing column, a prompt that is neither text nor messages, an empty
    prompt, or one longer than the limit (unless `drop_long`).
    """
    prompt_key = _column(rows[0], prompt_column, PROMPT_COLUMNS, field="data.prompt_column")
    answer_key = _column(rows[0], answer_column, ANSWER_COLUMNS, field="data.answer_column")
    if prompt_key is None:
        raise DataError(
            f"data.source = {source!r}: no prompt column; it has {_listed(rows[0])}, one of "
            f"{', '.join(PROMPT_COLUMNS)} is expected; name yours in data.prompt_column"
        )
    ids, prompts, kept = _ids(rows), [], []
    for index, row in enumerate(rows):
        where = f"data.source = {source!r}, row {index}"
        data = _data(row, prompt_key, answer_key, where=where)
        text = _text(data["prompt"], encoder, where=where)
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
    heldout = prompts.part(range(total - size, total))
    return HeldOut(
        train=prompts.part(range(total - size)),
        heldout=replace(heldout, num_dropped=0, num_ungradable=0),  # counted in `train`
    )


def fingerprint(prompts: Sequence[Prompt]) -> str:
    """Return a digest of ids, tokens and data, equal for equal prompts in every process.

    Of values that JSON cannot represent, only the type counts.
    """
    digest = hashlib.sha256()
    for prompt in prompts:
        content = [prompt.prompt_id, prompt.tokens, prompt.data]
        line = json.dumps(content, skipkeys=True, default=lambda value: type(value).__name__)
        digest.update(line.encode() + b"\n")
    return digest.hexdigest()[:16]


@final
class PromptSource:
    """Visits prompts epoch after epoch, each epoch in an order determined by (seed, epoch).

    The cursor is therefore two numbers, from which a restored source continues exactly.
    """

    def __init__(self, prompts: PromptSet, *, seed: int, shuffle: bool = True) -> None:
        assert prompts.prompts, "a prompt set is never empty"
        self._source, self._prompts = prompts.source, prompts.prompts
        self._seed, self._shuffle = seed, shuffle
        self._fingerprint = fingerprint(prompts.prompts)
        self._go_to(0, 0)

    def take(self, num_prompts: int) -> tuple[Taken, ...]:
        """Return the next prompts, crossing into new epochs as needed."""
        taken = []
        for _ in range(num_prompts):
            if self._position == len(self._prompts):
                self._go_to(self._epoch + 1, 0)
            prompt = self._prompts[self._order[self._position]]
            self._position += 1
            taken.append(Taken(prompt=prompt, epoch=self._epoch))
        return tuple(taken)

    def state(self) -> dict[str, Any]:
        """Return the cursor as JSON values."""
        return {**self._identity(), "epoch": self._epoch, "position": self._position}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved cursor; `DataError` if it belongs to other prompts or settings."""
        for name, here in self._identity().items():
            if state.get(name) != here:
                raise DataError(
                    f"data.source = {self._source!r}: the checkpoint was made with {name} = "
                    f"{state.get(name)!r}, now it is {here!r}; restore the data and settings of "
                    f"that run, or start anew in another run.dir"
                )
        epoch, position = state.get("epoch"), state.get("position")
        if not (isinstance(epoch, int) and isinstance(position, int)) or not (
            epoch >= 0 and 0 <= position <= len(self._prompts)
        ):
            raise DataError(f"the checkpoint's prompt cursor is damaged: {epoch=}, {position=}")
        self._go_to(epoch, position)

    def _identity(self) -> dict[str, Any]:
        return {
            "fingerprint": self._fingerprint,
            "num_prompts": len(self._prompts),
            "seed": self._seed,
            "shuffle": self._shuffle,
        }

    def _go_to(self, epoch: int, position: int) -> None:
        count = len(self._prompts)
        self._epoch, self._position = epoch, position
        self._order = epoch_order(self._seed, epoch, count) if self._shuffle else range(count)


def epoch_order(seed: int, epoch: int, count: int) -> Sequence[int]:
    """Return a permutation by a keyed hash, equal in every process and on every machine."""

    def draw(index: int) -> bytes:
        return hashlib.blake2b(f"{seed}/{epoch}/{index}".encode(), digest_size=8).digest()

    return sorted(range(count), key=draw)


def _column(row: Row, named: str | None, usual: tuple[str, ...], *, field: str) -> str | None:
    """Return the column that the user named, or else the first usual one."""
    if named is None:
        return next((column for column in usual if column in row), None)
    if named in row:
        return named
    hint = did_you_mean(named, row)
    raise DataError(f"{field} = {named!r}: there is no such column{hint}; found {_listed(row)}")


def _listed(row: Row) -> str:
    if not row:
        return "no columns"
    names = list(row)[:_MAX_LISTED]
    more = f" and {len(row) - len(names)} more" if len(row) > len(names) else ""
    return f"the columns {', '.join(names)}{more}"


def _ids(rows: Sequence[Row]) -> list[str]:
    """Return ids of the rows: from a column whose values are present and unique, or by index."""
    for column in ID_COLUMNS:
        values = [row.get(column) for row in rows]
        named = [str(value) for value in values if isinstance(value, (str, int)) and value != ""]
        if len(named) == len(rows) == len(set(named)):
            return named
    return [str(index) for index in range(len(rows))]


def _data(row: Row, prompt_key: str, answer_key: str | None, *, where: str) -> dict[str, Any]:
    if prompt_key not in row:
        raise DataError(f"{where}: the column {prompt_key!r} is missing; found {_listed(row)}")
    data = {**row, "prompt": row[prompt_key]}
    if answer_key is not None and answer_key in row:
        answer = row[answer_key]
        if isinstance(answer, Mapping) and "ground_truth" in answer:  # verl's reward_model
            answer = answer["ground_truth"]
        data["answer"] = answer
    return data


def _text(prompt: Any, encoder: Encoder, *, where: str) -> str:
    """Return the text of a prompt for the model."""
    is_text = isinstance(prompt, str)
    messages = [{"role": "user", "content": prompt}] if is_text else _messages(prompt, where=where)
    if not messages or not str(prompt).strip():
        raise DataError(f"{where}: the prompt is empty")
    if is_text and encoder.render is None:
        return prompt
    if encoder.render is None:
        raise DataError(
            f"{where}: the prompt is chat messages, but the tokenizer has no chat template; give "
            f"text prompts, or a model whose tokenizer has one"
        )
    try:
        return encoder.render(messages)
    except ConfigError as error:  # the template refuses these roles
        raise DataError(f"{where}: {error}") from error


def _messages(prompt: Any, *, where: str) -> Messages:
    good = isinstance(prompt, list) and all(
        isinstance(message, Mapping)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str)
        for message in prompt
    )
    if not good:
        raise DataError(
            f"{where}: the prompt is {type(prompt).__name__} {prompt!r:.80}, expected text or a "
            f"list of messages like {{'role': 'user', 'content': '...'}}"
        )
    return [dict(message) for message in prompt]
