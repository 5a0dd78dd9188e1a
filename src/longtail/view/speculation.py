"""One rollout of one worker over its seconds, from speculation.jsonl, as JSON values for a page.

A rollout has thousands of engine steps, so they are joined in at most `MOST_SLICES` slices of time.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from longtail.view.lines import lines_of, step_of_row
from longtail.view.values import count, number, numbers, row_of, short, shorts, text

FILE = "speculation.jsonl"
MOST_SLICES = 400
_MOST_SWITCHES, _MOST_REASON, _MOST_LINES = 200, 300, 256
_HEAD = re.compile(rb'\{"step": \d{1,15}, "kind": "(\w{1,20})", "worker": (\d{1,9}), ')
_COUNTS = ("running", "drafts", "nodes", "accepted")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Columns:
    """A rollout with one entry for each engine step, as `engine.rollout_log` writes it."""

    seconds: list[float]
    """Seconds from the start of the rollout to the end of each step."""
    running: list[float]
    drafts: list[float]
    nodes: list[float]
    accepted: list[float]


def read_rollout(directory: Path, step: int, line: int | None = None) -> dict[str, Any] | None:
    """Return the rollouts of a step by worker, and the columns of one; None without any.

    `line` chooses among `lines`; by default the last one, which the slowest worker wrote.
    """
    found = lines_of(directory / FILE, step, step_of_row)[-_MOST_LINES:]
    heads = [(head, each) for each in found if (head := _HEAD.match(each)) is not None]
    if not heads:
        return None
    chosen = len(heads) - 1 if line is None or not 0 <= line < len(heads) else line
    lines = [{"kind": head[1].decode(), "worker": int(head[2])} for head, _ in heads]
    row = row_of(heads[chosen][1])
    columns = _columns(row)
    shown = None if columns is None else _slices(columns) | _switches(row, columns)
    return {"lines": lines, "chosen": chosen, "rollout": shown}


def _columns(row: dict[str, Any]) -> _Columns | None:
    """Return the columns of a line; None if it is damaged."""
    seconds = numbers(row.get("seconds"))
    counts = {name: numbers(row.get(name)) for name in _COUNTS}
    if not seconds or any(len(column) != len(seconds) for column in counts.values()):
        return None
    if any(later < earlier for earlier, later in pairwise(seconds)):
        return None
    return _Columns(seconds=seconds, **counts)


def _slices(columns: _Columns) -> dict[str, Any]:
    """Return the columns joined by slices of time, with the totals of the rollout."""
    seconds = columns.seconds
    end_s = seconds[-1]
    begins = [0.0, *seconds[:-1]]
    firsts = _firsts(begins, end_s)
    groups = [slice(a, b) for a, b in zip(firsts, [*firsts[1:], len(seconds)], strict=True)]
    drafts = [sum(columns.drafts[group]) for group in groups]
    accepted = [sum(columns.accepted[group]) for group in groups]
    pooled = [1 + a / d if d else None for a, d in zip(accepted, drafts, strict=True)]
    plain_s = [
        sum(
            e - b for b, e, d in zip(begins[g], seconds[g], columns.drafts[g], strict=True) if not d
        )
        for g in groups
    ]
    whole_s = [seconds[group.stop - 1] - begins[group.start] for group in groups]
    num_drafts = sum(columns.drafts)
    return {
        "seconds": shorts([begins[first] for first in firsts]),
        "end_s": short(end_s),
        "running": shorts([_mean(columns.running[group]) for group in groups]),
        "nodes": shorts([_mean(columns.nodes[group]) for group in groups]),
        "most_nodes": shorts([max(columns.nodes[group]) for group in groups]),
        "accept_length": [short(each) for each in pooled],
        "plain_share": shorts([p / w if w else 0.0 for p, w in zip(plain_s, whole_s, strict=True)]),
        "num_engine_steps": len(seconds),
        "max_running": short(max(columns.running)),
        "mean_accept_length": short(1 + sum(columns.accepted) / num_drafts) if num_drafts else None,
        "plain_time_share": short(sum(plain_s) / end_s) if end_s else 0,
    }


def _firsts(begins: Sequence[float], end_s: float) -> list[int]:
    """Return the index of the first engine step of each slice that has one."""
    firsts: list[int] = []
    last = -1
    for index, begin in enumerate(begins):
        place = min(int(MOST_SLICES * begin / end_s), MOST_SLICES - 1) if end_s > 0 else 0
        if place > last:
            firsts.append(index)
            last = place
    return firsts


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _switches(row: dict[str, Any], columns: _Columns) -> dict[str, Any]:
    """Return the last switches between drafting and plain decoding, with their reasons."""
    found = []
    switches = row.get("switches")
    for each in switches if isinstance(switches, list) else ():
        if not (isinstance(each, list) and len(each) == 3 and number(each[0]) is not None):
            continue
        index = count(each[0])
        if index < len(columns.seconds):
            at_s = columns.seconds[index - 1] if index else 0.0
            running = short(columns.running[index])
            found.append([short(at_s), bool(each[1]), text(each[2], _MOST_REASON), running])
    return {"switches": found[-_MOST_SWITCHES:], "num_switches": len(found)}
