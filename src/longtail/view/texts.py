"""The completions of one step, from rollouts.jsonl: their lengths, a list of them, and one to read.

Which characters were drafted stands in drafts.jsonl, apart from the texts, since texts do not
depend on the drafter and drafts depend on the clock.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from longtail.view.lines import lines_of, step_of_row
from longtail.view.values import count, number, numbers, row_of, short, text

ROLLOUTS, DRAFTS = "rollouts.jsonl", "drafts.jsonl"
MOST_ROWS = 512
"""Largest number of completions in a list."""
_NUM_BINS = 40
_MOST_HEAD, _MOST_ID, _MOST_TEXT = 120, 200, 400_000


def read_lengths(directory: Path, step: int) -> dict[str, Any] | None:
    """Return the histogram of completion lengths in a step, tokens; None without completions."""
    rows = [row_of(line) for line in lines_of(directory / ROLLOUTS, step, step_of_row)]
    lengths = sorted(count(row.get("num_tokens")) for row in rows if "num_tokens" in row)
    if not lengths:
        return None
    width = _width(lengths[-1])
    counts = [0] * (lengths[-1] // width + 1)
    for length in lengths:
        counts[length // width] += 1
    return {
        "width": width,
        "counts": counts,
        "num": len(lengths),
        "mean": short(sum(lengths) / len(lengths)),
        "p50": _percentile(lengths, 50),
        "p99": _percentile(lengths, 99),
        "max": lengths[-1],
        "num_cut": sum(row.get("finish_reason") == "length" for row in rows),
    }


def _width(longest: int) -> int:
    """Return a round width of at most `_NUM_BINS` bins: 1, 2 or 5 times a power of ten."""
    least = (longest + 1) / _NUM_BINS
    power = 10 ** max(math.floor(math.log10(least)), 0) if least > 1 else 1
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least)


def _percentile(lengths: Sequence[int], percent: int) -> int:
    """Return a percentile that occurs, of ascending lengths."""
    return lengths[max(math.ceil(percent / 100 * len(lengths)) - 1, 0)]


def read_rows(directory: Path, step: int) -> dict[str, Any]:
    """Return the completions of a step without their texts, at most `MOST_ROWS`."""
    lines = lines_of(directory / ROLLOUTS, step, step_of_row)
    rows = [
        {
            "index": index,
            "prompt_id": text(row.get("prompt_id"), _MOST_ID),
            "reward": short(number(row.get("reward"))),
            "num_tokens": count(row.get("num_tokens")),
            "finish_reason": text(row.get("finish_reason"), 20),
            "head": text(row.get("text"), _MOST_HEAD),
        }
        for index, row in enumerate(map(row_of, lines[:MOST_ROWS]))
    ]
    return {"rows": rows, "num": len(lines)}


def read_text(directory: Path, step: int, index: int) -> dict[str, Any] | None:
    """Return one completion of a step with its prompt and drafted characters; None without it.

    `drafted` lists begin and end of each accepted draft, in characters of the text; None if the run
    did not keep them. `prompt` is None for runs that did not keep prompts.
    """
    lines = lines_of(directory / ROLLOUTS, step, step_of_row)
    if not 0 <= index < len(lines):
        return None
    row = row_of(lines[index])
    whole, prompt = row.get("text"), row.get("prompt")
    shown = text(whole, _MOST_TEXT)
    policy_version = number(row.get("policy_version"))
    return {
        "prompt_id": text(row.get("prompt_id"), _MOST_ID),
        "prompt": text(prompt, _MOST_TEXT) if isinstance(prompt, str) else None,
        "text": shown,
        "is_cut": isinstance(whole, str) and len(whole) > len(shown),
        "reward": short(number(row.get("reward"))),
        "num_tokens": count(row.get("num_tokens")),
        "finish_reason": text(row.get("finish_reason"), 20),
        "policy_version": short(policy_version),
        "drafted": _drafted(directory, step, row.get("request_id"), len(shown)),
    }


def _drafted(directory: Path, step: int, request_id: object, length: int) -> list[int] | None:
    """Return begin, end, begin, end, ... of the drafted characters, ascending."""
    found: object = None
    for line in lines_of(directory / DRAFTS, step, step_of_row):
        spans = row_of(line).get("drafted")
        if isinstance(spans, dict) and isinstance(request_id, str):
            found = spans.get(request_id, [])  # a text without accepted drafts has no entry
    if not isinstance(found, list):
        return None
    places = [int(place) for place in numbers(found) if 0 <= place <= length]
    ascend = all(a <= b for a, b in pairwise(places))
    return places if ascend and len(places) == len(found) and len(places) % 2 == 0 else None
