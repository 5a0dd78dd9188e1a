"""Columns of rows: which of them hold the prompt, the answer, an id and tools.

prompt, question, problem, query, input    text or chat messages (TRL, verl, OpenOrca)
instruction, with input or context         text, joined with a blank line (Alpaca, Dolly)
messages, conversations                    a chat (ShareGPT); an assistant's last message, which
                                           is the completion of sft, is left out
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from longtail.errors import DataError, JsonError, did_you_mean
from longtail.model.hf.chat import Messages, conversation, tool_name
from longtail.rl.data.sources import Row
from longtail.system.files import parse_json

CHAT_COLUMNS = ("messages", "conversations")
"""Columns with a whole chat."""

PROMPT_COLUMNS = (
    *("prompt", "question", "problem", "query", "instruction", "input"),
    *CHAT_COLUMNS,
)
"""Prompt columns in order of preference, for unset `data.prompt_column`."""

ANSWER_COLUMNS = ("answer", "ground_truth", "solution", "final_answer", "target", "reward_model")
"""Answer columns in order of preference, for unset `data.answer_column`; verl: the last."""

ID_COLUMNS = ("prompt_id", "problem_id", "id", "uid")
"""Columns whose values, if they are unique, become ids."""

_BESIDE = {
    "instruction": ("input", "context", "history"),
    "question": ("context", "passage", "choices", "options"),
}
"""Columns that belong to a prompt as well."""
_MAX_LISTED = 20
"""Most columns that an error lists."""


def find_column(row: Row, named: str | None, usual: tuple[str, ...], *, field: str) -> str | None:
    """Return the column that the user named, or else the first usual one."""
    if named is None:
        return next((column for column in usual if column in row), None)
    if named in row:
        return named
    hint = did_you_mean(named, row)
    raise DataError(f"{field} = {named!r}: there is no such column{hint}; found {listed(row)}")


def listed(row: Row) -> str:
    """Return the columns of a row, for an error."""
    if not row:
        return "no columns"
    names = list(row)[:_MAX_LISTED]
    more = f" and {len(row) - len(names)} more" if len(row) > len(names) else ""
    return f"the columns {', '.join(names)}{more}"


def ids_of(rows: Sequence[Row]) -> list[str]:
    """Return ids of the rows: from a column whose values are present and unique, or by index."""
    for column in ID_COLUMNS:
        values = [row.get(column) for row in rows]
        named = [str(value) for value in values if isinstance(value, (str, int)) and value != ""]
        if len(named) == len(rows) == len(set(named)):
            return named
    return [str(index) for index in range(len(rows))]


def prompt_of(row: Row, column: str, *, is_named: bool, where: str) -> Any:
    """Return the prompt of a row: a named column, or a usual one with what belongs to it."""
    if column not in row:
        raise DataError(f"{where}: the column {column!r} is missing; found {listed(row)}")
    prompt = row[column]
    if is_named:
        return prompt
    if column in CHAT_COLUMNS:
        if isinstance(prompt, str):
            raise DataError(
                f"{where}: {column} is the text {prompt!r:.80}; give a list of messages"
            )
        chat = chat_of(row, prompt, where=where)
        return chat[:-1] if chat[-1:] and chat[-1]["role"] == "assistant" else chat
    beside = [each for each in _BESIDE.get(column, ()) if row.get(each)]
    one_text = len(beside) == 1 and isinstance(row[beside[0]], str)
    if beside and not (column == "instruction" and one_text):
        raise DataError(
            f"{where}: beside {column!r} it has the column {beside[-1]!r}, which would be missing "
            "in the prompt; join them in a column of your own, or name data.prompt_column = "
            f"{column!r} to leave it out"
        )
    if beside and isinstance(prompt, str):
        prompt = f"{prompt}\n\n{row[beside[0]]}".rstrip()
    return chat_of(row, prompt, where=where) if _system(row) else prompt


def chat_column(row: Row) -> str | None:
    """Return the column with a whole chat; None if there is none."""
    return next((each for each in CHAT_COLUMNS if row.get(each) and type(row[each]) is list), None)


def chat_of(row: Row, prompt: Any, *, where: str) -> Messages:
    """Return a text or a chat as messages, behind the row's system message if it has none."""
    chat, system = conversation(prompt, where=where), _system(row)
    if system and not (chat and chat[0]["role"] == "system"):
        return [{"role": "system", "content": system}, *chat]
    return chat


def _system(row: Row) -> str:
    """Return the text of a column for it; empty without one."""
    values = (row.get(each) for each in ("system", "system_prompt"))
    return next((each for each in values if isinstance(each, str) and each.strip()), "")


def tools_of(row: Row, *, where: str) -> list[Any] | None:
    """Return the value of the column `tools`, a list or its JSON; None without any."""
    tools = row.get("tools") or None
    with suppress(JsonError):
        tools = parse_json(tools) if isinstance(tools, str) else tools
    if tools and not (isinstance(tools, list) and all(map(tool_name, tools))):
        raise DataError(
            f"{where}: the column 'tools' is {row['tools']!r:.80}, expected a list of functions "
            "with names, as TRL has it; rename the column if it holds something else"
        )
    return tools


def with_answer(row: Row, prompt: Any, answer_key: str | None) -> dict[str, Any]:
    """Return a row with its prompt as `prompt` and its reference, if there is one, as `answer`."""
    data = {**row, "prompt": prompt}
    if answer_key is not None and answer_key in row:
        answer = row[answer_key]
        if isinstance(answer, Mapping) and "ground_truth" in answer:  # verl's reward_model
            answer = answer["ground_truth"]
        data["answer"] = answer
    return data
