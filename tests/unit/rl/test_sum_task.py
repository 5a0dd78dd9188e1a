"""The embedded task of additions: problems, worked solutions, and the tail of their lengths."""

import re
from statistics import median

from longtail.rl.data.sum_task import examples, problems

ROWS = problems(400, 0, heldout=False)
SOLVED = examples(400, 0)


def terms(row) -> list[int]:
    return [int(number) for number in re.findall(r"[0-9]+", row["prompt"])]


def test_an_answer_is_the_sum_of_the_prompts_terms():
    for row in [*ROWS, *SOLVED]:
        assert row["answer"] == str(sum(terms(row)))
    for row in SOLVED:
        assert row["completion"].endswith(f"The sum is {row['answer']}.")


def test_each_eight_problems_have_one_that_is_long():
    lengths = [len(terms(row)) for row in ROWS]
    for start in range(0, len(lengths), 8):
        *short, longest = sorted(lengths[start : start + 8])
        assert 3 <= short[0] <= short[-1] <= 8
        assert 40 <= longest <= 100
    assert max(lengths) > 90
    assert median(lengths) < 6
