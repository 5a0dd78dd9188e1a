"""Supervised examples: rows to tokenized prompts with completions, and batches of them in order.

A row has a prompt and a completion, or one list of chat messages whose last, the assistant's, is
the completion. The prompt is tokenized as in RL (`rl.data.prompts`); the completion is tokenized
separately and followed by the end-of-text token, as the model generates it.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from longtail.errors import DataError
from longtail.rl.data.prompts import Encoder, PromptSet, PromptSource, encode_at, make_prompts
from longtail.rl.data.sources import Row
from longtail.types import Prompt

COMPLETION_COLUMNS = ("completion", "response", "output", "target", "solution", "answer")
"""Completion columns in order of preference, for unset `data.completion_column`."""

_TOKENS = "longtail_completion_tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One training sequence; the loss is on the tokens after the first `prompt_len`.

    Example: Example(tokens=(7, 8, 9, 2), prompt_len=2)
    """

    tokens: tuple[int, ...]
    prompt_len: int


def make_examples(
    rows: Sequence[Row],
    *,
    source: str,
    encoder: Encoder,
    eos_id: int,
    max_len: int,
    drop_long: bool = False,
    prompt_column: str | None = None,
    completion_column: str | None = None,
) -> PromptSet:
    """Tokenize every row once; a prompt's `data` contains its completion's tokens.

    Raises DataError in the cases of `make_prompts`, for a missing or empty completion, and for an
    example longer than `max_len` tokens (unless `drop_long`).
    """
    plain = [
        _prompt_and_completion(row, i, source, completion_column) for i, row in enumerate(rows)
    ]
    prompts = make_prompts(
        plain,
        source=source,
        encoder=encoder,
        max_prompt_len=max_len,  # of the whole example, below
        drop_long=drop_long,
        prompt_column=prompt_column if "messages" not in plain[0] else "prompt",
        limit_fields=("data.max_len", "data.drop_long"),
    )
    kept, kept_rows = [], []
    for index, prompt in zip(prompts.rows, prompts.prompts, strict=True):
        where = f"data.source = {source!r}, row {index}"
        tokens = encode_at(where, encoder, prompt.data["completion"])
        completion = (*tokens, eos_id)
        length = len(prompt.tokens) + len(completion)
        if length <= max_len:
            kept.append(replace(prompt, data={_TOKENS: completion}))
            kept_rows.append(index)
        elif not drop_long:
            raise DataError(
                f"{where}: prompt and completion have {length} tokens, data.max_len is "
                f"{max_len}; raise it, or set data.drop_long = true to leave such rows out"
            )
    if not kept:
        raise DataError(
            f"data.source = {source!r}: all {len(rows)} examples are longer than data.max_len = "
            f"{max_len}; raise it"
        )
    return PromptSet(
        source=source,
        prompts=tuple(kept),
        rows=tuple(kept_rows),
        num_dropped=len(rows) - len(kept),
    )


def example_of(prompt: Prompt) -> Example:
    """Return the sequence of a prompt that `make_examples` made."""
    return Example(tokens=prompt.tokens + prompt.data[_TOKENS], prompt_len=len(prompt.tokens))


@final
class ExampleBatches:
    """Divides a prompt source into batches of at most `batch_tokens` tokens, or one example.

    An example that did not fit begins the next batch; the cursor is that of the source before it.
    """

    def __init__(self, source: PromptSource, batch_tokens: int) -> None:
        self._source, self._budget = source, batch_tokens
        self._cursor = source.state()
        self._pending: Example | None = None

    def take(self) -> tuple[Example, ...]:
        """Return the next batch, crossing into new epochs as needed."""
        batch: list[Example] = []
        room = self._budget
        while True:
            if self._pending is None:
                self._cursor = self._source.state()
                self._pending = example_of(self._source.take(1)[0].prompt)
            room -= len(self._pending.tokens)
            if batch and room < 0:
                return tuple(batch)
            batch.append(self._pending)
            self._pending = None

    def state(self) -> dict[str, Any]:
        """Return the cursor as JSON values."""
        return self._source.state() if self._pending is None else self._cursor

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved cursor; DataError if it belongs to other examples."""
        self._source.restore(state)
        self._pending = None


def _prompt_and_completion(
    row: Row, index: int, source: str, completion_column: str | None
) -> dict[str, Any]:
    """Return a row in the form {..., "prompt": ..., "completion": text}."""
    where = f"data.source = {source!r}, row {index}"
    messages = row.get("messages")
    if completion_column is None and isinstance(messages, list) and messages:
        completion: Any = messages[-1:]
        plain = {**row, "prompt": messages[:-1]}
    else:
        column = completion_column or next((c for c in COMPLETION_COLUMNS if c in row), None)
        if column is None or column not in row:
            near = difflib.get_close_matches(column or "completion", list(row), n=1)
            hint = f", did you mean {near[0]!r}?" if near else ""
            raise DataError(
                f"{where}: no completion column{hint}; found {', '.join(row) or 'none'}; name "
                "yours in data.completion_column"
            )
        completion, plain = row[column], dict(row)
    if isinstance(completion, list) and len(completion) == 1 and isinstance(completion[0], Mapping):
        if completion[0].get("role") != "assistant":
            raise DataError(f"{where}: the last message is not the assistant's")
        completion = completion[0].get("content")  # TRL's conversational form
    if not isinstance(completion, str) or not completion.strip():
        raise DataError(f"{where}: the completion is {completion!r:.80}, expected text")
    return {**plain, "completion": completion}
