"""The embedded task `running_sums`: add several numbers, one at a time, in writing.

A worked text is as long as its sum has terms, and one sum in eight is ten to twenty times as long
as the others: a long tail. As in the training data of a base model, most solutions of short sums
answer at once. Supervised learning reproduces both kinds; reinforcement learning finds that working
step by step pays. It owns problems and solutions; pure Python, no model, no tokenizer.
"""

from collections.abc import Iterator
from itertools import accumulate
from random import Random
from typing import Any
from zlib import crc32

_LARGEST = 9
"""Largest term; the smallest is 1."""
_SHORT, _LONG, _SOLVED = (3, 8), (40, 100), (2, 24)
"""Fewest and most terms of a sum; their logarithm is distributed evenly."""
_TOGETHER = 8
"""Number of consecutive problems of which one is long, so that every batch has a tail."""
_HASTY_SHARE = 0.6
"""Share of the solutions of short sums that answer at once."""
_HELDOUT_SHARE = 4
"""Ratio of all problems to those held out."""


def problems(size: int, seed: int, *, heldout: bool) -> list[dict[str, Any]]:
    """Draw problems with answers; those held out are found by a hash of the prompt.

    Example row: {"prompt": "Add 6 + 8 + 2", "answer": "16"}
    """
    rng = Random(f"running_sums/{heldout}/{seed}")
    ranges = _problem_ranges(rng)
    return [_row(_draw_terms(rng, next(ranges), heldout=heldout)) for _ in range(size)]


def examples(size: int, seed: int) -> list[dict[str, Any]]:
    """Draw solved problems, none of them held out, to learn from.

    Example row: {"prompt": "Add 6 + 8 + 2", "answer": "16",
                  "completion": "6 + 8 = 14\\n+ 2 = 16\\nThe sum is 16."}
    """
    rng = Random(f"running_sums/examples/{seed}")
    rows = []
    for _ in range(size):
        terms = _draw_terms(rng, _SOLVED, heldout=False)
        is_hasty = len(terms) <= _SHORT[1] and rng.random() < _HASTY_SHARE
        lines = [*(() if is_hasty else additions(terms)), f"The sum is {sum(terms)}."]
        rows.append({**_row(terms), "completion": "\n".join(lines)})
    return rows


def _problem_ranges(rng: Random) -> Iterator[tuple[int, int]]:
    while True:
        long_one = rng.randrange(_TOGETHER)
        yield from (_LONG if place == long_one else _SHORT for place in range(_TOGETHER))


def _draw_terms(rng: Random, fewest_most: tuple[int, int], *, heldout: bool) -> list[int]:
    fewest, most = fewest_most
    while True:
        count = round(fewest * (most / fewest) ** rng.random())
        terms = [rng.randint(1, _LARGEST) for _ in range(count)]
        if (crc32(_prompt(terms).encode()) % _HELDOUT_SHARE == 0) == heldout:
            return terms


def _row(terms: list[int]) -> dict[str, Any]:
    return {"prompt": _prompt(terms), "answer": str(sum(terms))}


def _prompt(terms: list[int]) -> str:
    return f"Add {' + '.join(map(str, terms))}"


def additions(terms: list[int]) -> list[str]:
    """Return a line for each addition; from the second on, the total so far is not repeated.

    Example: additions([6, 8, 2]) == ["6 + 8 = 14", "+ 2 = 16"]
    """
    totals = list(accumulate(terms))[1:]
    lines = [f"+ {term} = {total}" for term, total in zip(terms[1:], totals, strict=True)]
    return [f"{terms[0]} {lines[0]}", *lines[1:]]
