"""The embedded task of additions: problems, worked solutions, and the tail of their lengths."""

import re
from statistics import median

from longtail.rl.data.sum_task import additions, problems

ROWS = problems(400, 0, heldout=False)


def terms(row) -> list[int]:
    return [int(number) for number in re.findall(r"[0-9]+", row["prompt"])]


def test_an_answer_is_the_sum_of_the_prompts_terms():
    for row in ROWS:
        assert row["answer"] == str(sum(terms(row)))
        assert row["completion"].endswith(f"The sum is {row['answer']}.")


def test_a_solution_adds_each_term_to_the_total_before_it():
    for row in ROWS:
        own = terms(row)
        total = own[0]
        for line, term in zip(additions(own), own[1:], strict=True):
            assert line == f"{total} + {term} = {total + term}"
            total += term


def test_some_solutions_are_worked_and_most_answer_at_once():
    worked = [row["completion"].count("\n") == len(terms(row)) - 1 for row in ROWS]
    at_once = ["\n" not in row["completion"] for row in ROWS]
    assert all(one != other for one, other in zip(worked, at_once, strict=True))
    assert 0.2 < sum(worked) / len(ROWS) < 0.5


def test_the_numbers_of_terms_have_a_long_tail():
    lengths = [len(terms(row)) for row in ROWS]
    assert min(lengths) == 2
    assert max(lengths) >= 4 * median(lengths)


def test_problems_are_drawn_from_the_seed_and_none_is_held_out():
    assert problems(50, 0, heldout=False) == ROWS[:50] != problems(50, 1, heldout=False)
    heldout = problems(400, 0, heldout=True)
    assert not {row["prompt"] for row in heldout} & {row["prompt"] for row in ROWS}
