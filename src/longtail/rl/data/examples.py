"""Supervised examples: rows to tokenized prompts with completions, and batches of them in order.

A row has a prompt and a completion, or one list of chat messages whose last, the assistant's, is
the completion. The prompt is tokenized as in RL (`rl.data.prompts`). What is learned is tokenized
separately: the text that the chat template writes behind the prompt, through its end token, as the
model is to generate it; without a template, the completion and the end-of-text token.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, final

from longtail.errors import ConfigError, DataError, did_you_mean
from longtail.model.hf.chat import END_THINK, THINK, conversation, opens_thought
from longtail.model.hf.ends import Ends
from longtail.rl.data.columns import chat_column, chat_of, tools_of
from longtail.rl.data.prompts import Encoder, EpochCursor, encode_at, epoch_order, make_prompts
from longtail.rl.data.sources import Row
from longtail.system.device import to_stderr
from longtail.types import Prompt

COMPLETION_COLUMNS = ("completion", "response", "output", "target", "solution", "answer")
"""Completion columns in order of preference, for unset `data.completion_column`."""

_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Fields of a message that hold its thought."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One training sequence; the loss is on the tokens after the first `prompt_len`."""

    tokens: tuple[int, ...]
    prompt_len: int


def make_examples(
    rows: Sequence[Row],
    *,
    source: str,
    encoder: Encoder,
    ends: Ends,
    max_len: int,
    drop_long: bool = False,
    prompt_column: str | None = None,
    completion_column: str | None = None,
) -> tuple[list[Example], int]:
    """Tokenize every row once; return the examples, and the number of rows that are left out.

    It is said, once, if the chat template writes answers otherwise than behind their prompts.
    Raises DataError in the cases of `make_prompts`, for a missing or empty completion, and for an
    example longer than `max_len` tokens (unless `drop_long`).
    """
    is_chat = completion_column is None and chat_column(rows[0]) is not None
    plain = [
        _prompt_and_completion(row, i, source, completion_column) for i, row in enumerate(rows)
    ]
    prompts = make_prompts(
        plain,
        source=source,
        encoder=encoder,
        max_prompt_len=max_len,  # of the whole example, below
        drop_long=drop_long,
        prompt_column="prompt" if is_chat else prompt_column,
        limit_fields=("data.max_len", "data.drop_long"),
    )
    kept, said = list[Example](), ""
    for index, prompt in zip(prompts.rows, prompts.prompts, strict=True):
        where = f"data.source = {source!r}, row {index}"
        target, difference = _target(prompt, encoder, ends, where)
        said = said or difference
        learned = encode_at(where, partial(encoder.encode, goes_on=True), target)
        if not learned or learned[-1] not in ends.ids:
            learned += (ends.ids[0] if ends.turn_id is None else ends.turn_id,)
        tokens = (*prompt.tokens, *learned)
        if len(tokens) <= max_len:
            kept.append(Example(tokens=tokens, prompt_len=len(prompt.tokens)))
        elif not drop_long:
            raise DataError(
                f"{where}: prompt and completion have {len(tokens)} tokens, data.max_len is "
                f"{max_len}; raise it, or set data.drop_long = true to leave such rows out"
            )
    if not kept:
        raise DataError(
            f"data.source = {source!r}: all {len(rows)} examples are longer than data.max_len = "
            f"{max_len}; raise it"
        )
    if said:
        to_stderr(said)
    return kept, len(rows) - len(kept)


def _target(prompt: Prompt, encoder: Encoder, ends: Ends, where: str) -> tuple[str, str]:
    """Return the text to learn behind a prompt, and how the template's own differs ("" if not).

    Where it differs: the completion, behind an empty thought if the prompt opens one and the
    completion has none; the tag that opens it is not repeated.
    """
    answer = dict(prompt.data["completion"])
    content: str = answer["content"]
    if encoder.render is None:
        return content, ""
    messages = conversation(prompt.data["prompt"], where=where)
    if messages[-1]["role"] == "assistant":  # the completion goes on with it
        answer |= {"content": messages.pop()["content"] + content}
    messages.append(answer)
    try:
        tools = tools_of(prompt.data, where=where)
        whole = encoder.render(messages, tools=tools, generation_prompt=False)
    except ConfigError as error:
        whole = str(error)
    text = whole.removeprefix(prompt.text)
    thoughts = [str(answer.get(name) or "") for name in _THOUGHTS]
    parts = [*re.split(f"{THINK}|{END_THINK}", content), *thoughts]
    if text != whole and all(part.strip() in text for part in parts):
        return ends.cut(text), ""
    if opens_thought(prompt.text):
        blanks = prompt.text.rpartition(THINK)[2]
        content = content.removeprefix(THINK).removeprefix(blanks)
        if END_THINK not in content:
            content = f"{blanks}{END_THINK}{blanks * 2}{content}"
    difference = (
        f"{where}: the chat template does not write the answer behind the prompt, which ends with "
        f"{prompt.text[-40:]!r}: with the answer it writes {whole[-80:]!r}; such rows are learned "
        f"as {content[:40]!r} behind the prompt"
    )
    return content, difference


@final
class ExampleBatches(EpochCursor):
    """Endless batches of at most `batch_tokens` tokens and at least one example."""

    def __init__(
        self,
        examples: Sequence[Example],
        batch_tokens: int,
        seed: int,
        origin: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`origin` is what the examples are made from, as `origin_of` returns it."""
        self._examples, self._budget = examples, batch_tokens
        super().__init__(len(examples), seed, {"num_examples": len(examples), **origin})

    @property
    def per_epoch(self) -> int:
        """Number of batches of the first epoch, if none crosses into the next one."""
        count = room = 0
        for index in epoch_order(self._seed, 0, len(self._examples)):
            room -= len(self._examples[index].tokens)
            if room < 0:
                count, room = count + 1, self._budget - len(self._examples[index].tokens)
        return count

    def take(self, *, crosses: bool = True) -> tuple[Example, ...]:
        """Return the next batch; `crosses`: it may go on in the next epoch."""
        batch: list[Example] = []
        room = self._budget
        while True:
            if batch and not crosses and self._position == len(self._examples):
                return tuple(batch)
            example = self._examples[self._next()]
            room -= len(example.tokens)
            if batch and room < 0:
                return tuple(batch)
            batch.append(example)
            self._position += 1


def _prompt_and_completion(
    row: Row, index: int, source: str, completion_column: str | None
) -> dict[str, Any]:
    """Return a row in the form {..., "prompt": ..., "completion": the assistant's message}."""
    where = f"data.source = {source!r}, row {index}"
    chat = chat_column(row) if completion_column is None else None
    if chat is not None:
        messages = chat_of(row, row[chat], where=where)
        completion: Any = messages[-1:]
        plain = {**row, "prompt": messages[:-1]}
    else:
        column = completion_column or next((c for c in COMPLETION_COLUMNS if c in row), None)
        if column is None or column not in row:
            hint = did_you_mean(column or "completion", row)
            raise DataError(
                f"{where}: no completion column{hint}; found {', '.join(row) or 'none'}; "
                f"name yours in data.completion_column"
            )
        completion, plain = row[column], dict(row)
    if isinstance(completion, list) and len(completion) == 1 and isinstance(completion[0], Mapping):
        if completion[0].get("role") != "assistant":
            raise DataError(f"{where}: the last message is not the assistant's")
        answer = dict(completion[0])  # TRL's conversational form
    else:
        answer = {"role": "assistant", "content": completion}
    content = answer.get("content")
    if not isinstance(content, str) or not content.strip():
        raise DataError(f"{where}: the completion is {content!r:.80}, expected text")
    return {**plain, "completion": answer}
