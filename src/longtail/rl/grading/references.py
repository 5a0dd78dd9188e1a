"""Check, before any generation, that a reward can grade the rows of a prompt set.

Every completion of a row without a usable reference answer is excluded. `Reward.check` checks one
row; `rl.grading.pool` owns the processes in which it runs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from longtail.errors import DataError
from longtail.rl.data.prompts import PromptSet
from longtail.rl.grading.reward import required_columns

Check = Callable[[Sequence[Mapping[str, Any]]], Mapping[int, str]]
"""Map rows, reduced to the columns that a reward needs, to reasons why some cannot be graded."""


def gradable(prompts: PromptSet, reward_name: str, check: Check, *, drop: bool) -> PromptSet:
    """Return the prompts whose completions the reward can grade.

    Rows that are equal in the columns that the reward needs are checked once.

    Raises DataError naming the first row that cannot be graded; with `drop`, only if none can.
    """
    columns = required_columns(reward_name)
    reasons: dict[int, str] = {}
    equal_rows: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts.prompts):
        missing = [name for name in columns if prompt.data.get(name) is None]
        if missing:
            reasons[index] = (
                f"reward.name = {reward_name!r} needs {missing[0]!r}, which this row lacks (it has "
                f"{', '.join(prompt.data)})"
            )
        elif columns:
            equal_rows.setdefault(repr([prompt.data[name] for name in columns]), []).append(index)
    index_lists = list(equal_rows.values())
    firsts = (prompts.prompts[indices[0]].data for indices in index_lists)
    rows = [{name: data[name] for name in columns} for data in firsts]
    for number, why in check(rows).items():
        reasons |= dict.fromkeys(index_lists[number], why)
    if reasons and (not drop or len(reasons) == len(prompts.prompts)):
        raise DataError(_error_text(prompts, reasons))
    kept = [index for index in range(len(prompts.prompts)) if index not in reasons]
    return replace(prompts.part(kept), num_ungradable=len(reasons))


def _error_text(prompts: PromptSet, reasons: Mapping[int, str]) -> str:
    first, *others = sorted(reasons)
    column = "" if prompts.answer_column is None else f", column {prompts.answer_column!r}"
    more = f"; {len(others)} more of {len(prompts.prompts)} rows are no better" if others else ""
    return (
        f"data.source = {prompts.source!r}, row {prompts.rows[first]}{column}: {reasons[first]}"
        f"{more}; mend the data, name the column of the answers in data.answer_column, choose "
        "another reward.name, or set data.drop_ungradable = true to leave such rows out"
    )
