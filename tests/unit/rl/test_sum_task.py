"""The embedded task of additions: problems, worked solutions, and the tail of their lengths."""

import re
from statistics import median

from longtail.rl.data.sum_task import additions, examples, problems

ROWS = problems(400, 0, heldout=False)
SOLVED = examples(400, 0)


def terms(row) -> list[int]:
    return [int(number) for number in re.findall(r"[0-9]+", row["prompt"])]


def test_an_answer_is_the_sum_of_the_prompts_terms():
    for row in [*ROWS, *SOLVED]:
        assert row["answer"] == str(sum(terms(row)))
    for row in SOLVED:
        assert row["completion"].endswith(f"The sum is {row['answer']}.")


def test_a_solution_adds_each_term_to_the_total_so_far():
    for row in SOLVED:
        own = terms(row)
        total = own[0]
        for number, (line, term) in enumerate(zip(additions(own), own[1:], strict=True)):
            before = f"{total} " if number == 0 else ""
            total += term
            assert line == f"{before}+ {term} = {total}"


def test_some_solutions_of_short_sums_answer_at_once_and_all_others_are_worked():
    worked = [row["completion"].count("\n") == len(terms(row)) - 1 for row in SOLVED]
    at_once = ["\n" not in row["completion"] for row in SOLVED]
    assert all(one != other for one, other in zip(worked, at_once, strict=True))
    short = [len(terms(row)) <= 8 for row in SOLVED]
    assert not any(hasty for hasty, is_short in zip(at_once, short, strict=True) if not is_short)
    assert 0.3 < sum(at_once) / sum(short) < 0.7


def test_each_eight_problems_have_one_that_is_long():
    lengths = [len(terms(row)) for row in ROWS]
    for start in range(0, len(lengths), 8):
        *short, longest = sorted(lengths[start : start + 8])
        assert 2 <= short[0] <= short[-1] <= 8
        assert 40 <= longest <= 120
    assert max(lengths) > 100
    assert median(lengths) < 6


def test_problems_are_drawn_from_the_seed_and_none_is_held_out():
    assert problems(50, 0, heldout=False) == ROWS[:50] != problems(50, 1, heldout=False)
    heldout = problems(400, 0, heldout=True)
    seen = {row["prompt"] for row in [*ROWS, *SOLVED]}
    assert not {row["prompt"] for row in heldout} & seen
