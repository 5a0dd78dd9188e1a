"""The embedded task `running_sums`: add several numbers, one at a time, in writing.

A worked text is as long as its sum has terms, and the number of terms is log-normal: texts have a
long tail. As in the training data of a base model, most solutions answer at once. Supervised
learning reproduces both kinds; reinforcement learning finds that working step by step pays. It owns
problems and solutions; pure Python, no model, no tokenizer.
"""

import math
from itertools import accumulate, pairwise
from random import Random
from typing import Any
from zlib import crc32

_LARGEST = 9
"""Largest term; the smallest is 1."""
_FEWEST, _MEDIAN, _MOST = 2, 5, 24
"""Terms of a sum."""
_SPREAD = 0.8
"""Standard deviation of the logarithm of the number of terms."""
_HASTY_SHARE = 0.65
"""Share of the solutions that answer at once."""
_HELDOUT_SHARE = 4
"""Ratio of all problems to those held out."""


def problems(size: int, seed: int, *, heldout: bool) -> list[dict[str, Any]]:
    """Draw problems with worked solutions; those held out are found by a hash of the prompt.

    Example row: {"prompt": "Add 6 + 8 + 2", "answer": "16",
                  "completion": "6 + 8 = 14\\n14 + 2 = 16\\nThe sum is 16."}
    """
    rng = Random(f"running_sums/{heldout}/{seed}")
    rows: list[dict[str, Any]] = []
    while len(rows) < size:
        terms = _draw_terms(rng)
        prompt = f"Add {' + '.join(map(str, terms))}"
        if (crc32(prompt.encode()) % _HELDOUT_SHARE == 0) == heldout:
            steps = () if rng.random() < _HASTY_SHARE else additions(terms)
            answer = str(sum(terms))
            completion = "\n".join([*steps, f"The sum is {answer}."])
            rows.append({"prompt": prompt, "answer": answer, "completion": completion})
    return rows


def _draw_terms(rng: Random) -> list[int]:
    wanted = round(rng.lognormvariate(math.log(_MEDIAN), _SPREAD))
    return [rng.randint(1, _LARGEST) for _ in range(max(_FEWEST, min(_MOST, wanted)))]


def additions(terms: list[int]) -> list[str]:
    """Return a line for each addition.

    Example: additions([6, 8, 2]) == ["6 + 8 = 14", "14 + 2 = 16"]
    """
    totals = accumulate(terms)
    return [
        f"{before} + {term} = {after}"
        for (before, after), term in zip(pairwise(totals), terms[1:], strict=True)
    ]
