"""One step of a run as JSON values of bounded size: workers, completions, and one rollout."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from longtail.run.metrics_log import is_number
from longtail.view.series import short

Row = dict[str, Any]
Number = int | float

MOST_SPANS, _MOST_MARKS = 4000, 500
MOST_SLICES, _MOST_SWITCHES = 400, 200
MOST_ROWS, _NUM_BINS = 512, 40
_MOST_HEAD, _MOST_TEXT = 120, 400_000
"""Characters of a completion in a list, and of one that is read."""


def timeline(events: Sequence[Row]) -> Row | None:
    """Return the workers' states in a step; given its events; None without any.

    Of more than `MOST_SPANS` spans the shortest are left out. Seconds count from the first span,
    which in a step with an evaluation or a start is before the step.
    """
    spans = [each for each in events if each["ph"] == "X"]
    if not spans:
        return None
    begin = min(each["ts"] for each in spans)

    def seconds(at: Number) -> float | None:
        return short((at - begin) / 1e6)

    longest = sorted(spans, key=lambda each: each["dur"])[-MOST_SPANS:]
    longest.sort(key=lambda each: (each["tid"], each["ts"]))
    return {
        "workers": sorted({each["tid"] for each in spans}),
        "end_s": seconds(max(each["ts"] + each["dur"] for each in spans)),
        "spans": [
            [each["tid"], each["name"], seconds(each["ts"]), seconds(each["ts"] + each["dur"])]
            for each in longest
        ],
        "marks": [
            [each["tid"], seconds(each["ts"]), each["name"]] for each in events if each["ph"] == "i"
        ][:_MOST_MARKS],
    }


# ---- completions


_COMPLETION: dict[str, Any] = {
    **dict.fromkeys(("prompt_id", "request_id", "finish_reason", "prompt", "text"), str),
    **dict.fromkeys(("num_tokens", "policy_version"), int),
}


def is_completion(row: Mapping[str, Any]) -> bool:
    """Return whether a line of rollouts.jsonl is as longtail writes it."""
    are_typed = all(isinstance(row.get(name), kind) for name, kind in _COMPLETION.items())
    messages, rewards = row.get("messages", []), row.get("rewards", [])
    are_typed = are_typed and isinstance(messages, list) and all(map(_is_message, messages))
    return are_typed and is_number(row.get("reward")) and _are_numbers(rewards)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(text, str) for text in (value.get("role"), value.get("content"))
    )


def has_drafts(row: Mapping[str, Any]) -> bool:
    """Return whether a line of drafts.jsonl is as longtail writes it."""
    drafted = row.get("drafted")
    return isinstance(drafted, dict) and all(map(_are_numbers, drafted.values()))


def is_rollout(row: Mapping[str, Any]) -> bool:
    """Return whether a line of speculation.jsonl is as longtail writes it."""
    lists = [row.get(name) for name in ("seconds", "running", "drafts", "nodes", "accepted")]
    if not (all(map(_are_numbers, lists)) and lists[0] and {"kind", "worker"} <= row.keys()):
        return False
    places, switches = range(len(lists[0])), row.get("switches")
    return (
        all(len(each or ()) == len(places) for each in lists)
        and isinstance(switches, list)
        and all(
            isinstance(each, list) and len(each) == 3 and each[0] in places for each in switches
        )
    )


def _are_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(map(is_number, values))


def lengths(rows: Sequence[Row]) -> Row | None:
    """Return the histogram of completion lengths, tokens; None without completions."""
    if not rows:
        return None
    sizes = sorted(row["num_tokens"] for row in rows)
    width = _width(sizes[-1])
    counts = [0] * (sizes[-1] // width + 1)
    for size in sizes:
        counts[size // width] += 1
    return {
        "width": width,
        "counts": counts,
        "num": len(sizes),
        "mean": short(sum(sizes) / len(sizes)),
        "p50": _percentile(sizes, 50),
        "p99": _percentile(sizes, 99),
        "max": sizes[-1],
        "num_cut": sum(row["finish_reason"] == "length" for row in rows),
    }


def _width(longest: int) -> int:
    """Return a round width of at most `_NUM_BINS` bins: 1, 2 or 5 times a power of ten."""
    least = (longest + 1) / _NUM_BINS
    power = 10 ** math.floor(math.log10(least)) if least > 1 else 1
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least)


def _percentile(sizes: Sequence[int], percent: int) -> int:
    """Return a percentile that occurs, of ascending sizes."""
    return sizes[max(math.ceil(percent / 100 * len(sizes)) - 1, 0)]


def listed(rows: Sequence[Row]) -> Row:
    """Return completions without their texts, at most `MOST_ROWS`."""
    names = ("prompt_id", "reward", "num_tokens", "finish_reason")
    shown = [
        {"index": index, "head": row["text"][:_MOST_HEAD], **{name: row[name] for name in names}}
        for index, row in enumerate(rows[:MOST_ROWS])
    ]
    return {"rows": shown, "num": len(rows)}


def completion(row: Row, drafts: Sequence[Row]) -> Row:
    """Return one completion with its prompt and drafted characters.

    `drafts` are the step's rows of drafts.jsonl, which are apart from the texts, which do not
    depend on the drafter. `drafted` has begin and end of each accepted draft, in characters of the
    text; None if the run did not keep them. `turns`: see `_turns`; `calls` are all and bad ones.
    """
    names = ("prompt_id", "reward", "num_tokens", "finish_reason", "policy_version")
    text = row["text"][:_MOST_TEXT]
    drafted = drafts[-1]["drafted"].get(row["request_id"], []) if drafts else None
    return {
        **{name: row[name] for name in names},
        "turns": _turns(row),
        "calls": [row.get(name) for name in ("num_calls", "num_bad_calls")],
        "prompt": row["prompt"][:_MOST_TEXT],
        "text": text,
        "is_cut": len(text) < len(row["text"]),
        "drafted": None if drafted is None else [min(place, len(text)) for place in drafted],
    }


def _turns(row: Row) -> list[list[Any]]:
    """Return begin, end, role and reward of each message of an episode, in characters of its text.

    An observation has no reward. There are none if the text is not made of the messages.
    """
    found, end, rewards = list[list[Any]](), 0, iter(row.get("rewards") or ())
    for message in row.get("messages") or ():
        begin = row["text"].find(message["content"], end)
        if begin < 0:
            return []
        end = begin + len(message["content"])
        reward = next(rewards, None) if message["role"] == "assistant" else None
        found.append([begin, end, message["role"], reward])
    return found


# ---- the rollout of one worker


def speculation(row: Row) -> Row:
    """Return a rollout over its seconds, given its line of speculation.jsonl.

    A rollout has thousands of engine steps; they are joined in at most `MOST_SLICES` slices of
    time.
    """
    ends, drafts, accepted = row["seconds"], row["drafts"], row["accepted"]
    begins = [0.0, *ends[:-1]]
    firsts = _firsts(begins, ends[-1])
    groups = [slice(a, b) for a, b in zip(firsts, [*firsts[1:], len(ends)], strict=True)]
    steps = zip(begins, ends, drafts, strict=True)
    plain_s = sum(end - begin for begin, end, num_drafts in steps if not num_drafts)

    def means(values: Sequence[Number]) -> list[float | None]:
        return [short(sum(values[group]) / len(values[group])) for group in groups]

    def accept_length(group: slice) -> float | None:
        num_drafts = sum(drafts[group])
        return short(1 + sum(accepted[group]) / num_drafts) if num_drafts else None

    switches = [
        [begins[index], is_drafting, reason, row["running"][index]]
        for index, is_drafting, reason in row["switches"][-_MOST_SWITCHES:]
    ]
    return {
        "seconds": [short(begins[first]) for first in firsts],
        "end_s": ends[-1],
        "running": means(row["running"]),
        "nodes": means(row["nodes"]),
        "accept_length": [accept_length(group) for group in groups],
        "num_engine_steps": len(ends),
        "max_running": max(row["running"]),
        "mean_accept_length": accept_length(slice(None)),
        "plain_time_share": short(plain_s / ends[-1]) if ends[-1] else 0.0,
        "switches": switches,
        "num_switches": len(row["switches"]),
    }


def _firsts(begins: Sequence[Number], end_s: Number) -> list[int]:
    """Return the index of the first engine step of each slice that has one."""
    firsts: list[int] = []
    last = -1
    for index, begin in enumerate(begins):
        place = min(int(MOST_SLICES * begin / end_s), MOST_SLICES - 1) if end_s else 0
        if place > last:
            firsts.append(index)
            last = place
    return firsts
