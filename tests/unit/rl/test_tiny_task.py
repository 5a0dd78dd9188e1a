"""The embedded task: walks, splits, solutions, grading."""

from random import Random
from statistics import median

import pytest

from longtail.rl.data import tiny_task as task
from longtail.rl.data.tiny_task import Manner

CAREFUL = Manner(careful=True, talkative=0.5, tiring=0.0)


def start_of(problem) -> int:
    return int(problem["problem_id"].split("/")[1])


def test_the_walk_of_six_is_the_known_one():
    assert task.walk(6) == (6, 3, 10, 5, 16, 8, 4, 2, 1)
    assert len(task.walk(27)) - 1 == 111  # the textbook example
    assert task.walk(1) == (1,)


def test_an_answer_is_the_number_of_steps():
    for problem in task.problems(64, 3, "train"):
        number, steps = start_of(problem), 0
        while number != 1:
            number = number // 2 if number % 2 == 0 else 3 * number + 1
            steps += 1
        assert problem["answer"] == str(steps)


@pytest.mark.slow
def test_the_splits_share_no_start():
    train = {start_of(p) for p in task.problems(2000, 0, "train")}
    heldout = {start_of(p) for p in task.problems(2000, 1, "heldout")}
    assert train
    assert heldout
    assert not train & heldout


@pytest.mark.slow
def test_the_examples_to_imitate_ask_for_no_held_out_start():
    questions = {p["prompt"][0]["content"] for p in task.problems(2000, 0, "heldout")}
    assert not questions & {e["prompt"][0]["content"] for e in task.examples(2000, 0)}


def test_problems_are_determined_by_size_seed_and_split():
    assert task.problems(40, 7, "train") == task.problems(40, 7, "train")
    assert task.problems(40, 7, "train") == task.problems(80, 7, "train")[:40]
    assert task.problems(40, 7, "train") != task.problems(40, 8, "train")


def test_every_problem_has_an_id_of_its_own():
    ids = [p["problem_id"] for p in task.problems(2048, 0, "train")]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_any_sixteen_problems_in_order_have_a_heavy_tail(split):
    rows = task.problems(512, 0, split)
    for first in range(0, 512, 16):
        steps = [int(row["answer"]) for row in rows[first : first + 16]]
        assert max(steps) >= 90
        assert max(steps) >= 6 * median(steps)


def test_a_careful_solution_is_right_in_every_line():
    rng = Random(0)
    for start in (2, 7, 27, 97):
        text = task.solution(start, CAREFUL, rng)
        numbers = task.walk(start)
        lines = [line for line in text.split("\n") if line[:1].isdigit() and ":" in line]
        assert len(lines) == len(numbers)
        for count, (line, number) in enumerate(zip(lines, numbers, strict=True)):
            assert line.startswith(f"{count}:")
            assert str(number) in line
        assert task.grade({"answer": str(len(numbers) - 1)}, text) == 1.0


def test_a_tired_solution_guesses_and_is_mostly_wrong():
    rng = Random(0)
    tired = Manner(careful=False, talkative=0.5, tiring=0.5)
    grades = [task.grade({"answer": "111"}, task.solution(27, tired, rng)) for _ in range(50)]
    assert sum(grades) <= 5


def test_solutions_of_one_problem_differ_in_wording():
    rng = Random(0)
    assert len({task.solution(27, CAREFUL, rng) for _ in range(20)}) == 20


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<think>\n8\n</think>\nThe answer is 8.", 1.0),
        ("<think>\n8\n</think>\nNot 7 but 8", 1.0),
        ("<think>\n8\n</think>\n8 or 9", 0.0),
        ("<think>\n8\n</think>\n18", 0.0),
        ("<think>\n8\n</think>\nI do not know", 0.0),
        ("<think>\n1: to 8", 0.0),  # cut off while thinking
        ("The answer is 8.", 0.0),
        ("", 0.0),
        ("<think> </think> 9 </think> 8", 1.0),
    ],
)
def test_only_the_last_number_after_the_thinking_counts(text, reward):
    assert task.grade({"answer": "8"}, text) == reward
