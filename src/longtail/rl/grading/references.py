"""Which rows a reward can grade at all: found before any work, not after hours of generation.

A completion of a row that has no usable reference answer is excluded whatever it says. How one row
is checked is the reward's business (`Reward.check`), the processes in which that happens are
`rl.grading.pool`'s.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from longtail.errors import DataError
from longtail.rl.data.prompts import PromptSet
from longtail.rl.grading.reward import required_columns
from longtail.types import Prompt

_MAX_NAMED = 5
"""Further rows that an error names."""

Check = Callable[[Sequence[Mapping[str, Any]]], Mapping[int, str]]
"""From what rows hold in the columns a reward needs to why some cannot be graded, by place."""


def gradable(prompts: PromptSet, reward_name: str, check: Check, *, drop: bool) -> PromptSet:
    """Return the prompts whose completions the reward can grade.

    Rows that are alike in the columns that the reward needs are checked once.

    Raises DataError, naming the first row that cannot be graded, or, with `drop`, where none can.
    """
    columns = required_columns(reward_name)
    reasons = {
        place: f"reward.name = {reward_name!r} needs {missing!r}, which this row lacks (it has "
        f"{', '.join(prompt.data)})"
        for place, prompt in enumerate(prompts.prompts)
        if (missing := _missing(prompt, columns)) is not None
    }
    alike: dict[str, list[int]] = {}
    for place, prompt in enumerate(prompts.prompts):
        if columns and place not in reasons:
            alike.setdefault(repr([prompt.data[name] for name in columns]), []).append(place)
    places = list(alike.values())
    asked = [{name: prompts.prompts[same[0]].data[name] for name in columns} for same in places]
    for number, why in check(asked).items():
        reasons |= dict.fromkeys(places[number], why)
    if reasons and (not drop or len(reasons) == len(prompts.prompts)):
        raise DataError(_complaint(prompts, reasons))
    kept = [place for place in range(len(prompts.prompts)) if place not in reasons]
    return replace(prompts.part(kept), num_ungradable=len(reasons))


def _missing(prompt: Prompt, columns: Sequence[str]) -> str | None:
    return next((name for name in columns if prompt.data.get(name) is None), None)


def _complaint(prompts: PromptSet, reasons: Mapping[int, str]) -> str:
    first, *others = sorted(reasons)
    column = "" if prompts.answer_column is None else f", column {prompts.answer_column!r}"
    more = ""
    if others:
        named = [str(prompts.rows[place]) for place in others[:_MAX_NAMED]]
        rows = ", ".join([*named, "..."] if len(others) > _MAX_NAMED else named)
        more = f"; {len(others)} more of {len(prompts.prompts)} rows are no better ({rows})"
    return (
        f"data.source = {prompts.source!r}, row {prompts.rows[first]}{column}: {reasons[first]}"
        f"{more}; mend the data, name the column of the answers in data.answer_column, choose "
        "another reward.name, or set data.drop_ungradable = true to leave such rows out"
    )
