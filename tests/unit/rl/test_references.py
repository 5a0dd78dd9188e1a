"""Rows that no completion can be graded by are found before any work."""

import pytest

from longtail.config.rewards import RewardSection
from longtail.errors import DataError
from longtail.rl.data.prompts import Encoder, hold_out, make_prompts
from longtail.rl.grading.pool import GraderPool, gradable
from longtail.rl.grading.reward import Grader

ENCODER = Encoder(encode=lambda text, **_: list(text.encode()), render=None)
UNUSABLE = [None, float("nan"), "", "####", [1]]


def prompts_of(*answers, **options):
    rows = [{"prompt": f"{n}?", "solution": answer} for n, answer in enumerate(answers)]
    return make_prompts(
        rows, source="math.jsonl", encoder=ENCODER, max_prompt_len=100, drop_long=True, **options
    )


def gradable_here(prompts, *, drop=False):
    return gradable(prompts, "exact", Grader("exact").check, drop=drop)


@pytest.mark.parametrize("answer", UNUSABLE, ids=repr)
def test_the_row_the_column_the_value_and_the_remedy_are_named(answer):
    with pytest.raises(DataError) as raised:
        gradable_here(prompts_of("42", "41", answer, answer))
    said = str(raised.value)
    assert said.startswith("data.source = 'math.jsonl', row 2, column 'solution': reward")
    assert ("lacks (it has prompt, solution, answer)" if answer is None else repr(answer)) in said
    assert "1 more of 4 rows have such faults" in said
    assert "data.drop_ungradable = true" in said


def test_rows_that_cannot_be_graded_may_be_left_out():
    kept = gradable_here(prompts_of("1", float("nan"), "3", None, 4.0), drop=True)
    assert [prompt.prompt_id for prompt in kept.prompts] == ["math/0", "math/2", "math/4"]
    assert kept.rows == (0, 2, 4)
    assert hold_out(kept, 1).heldout.rows == (4,)


def test_alike_rows_are_checked_once():
    asked = []

    def check(rows):
        asked.extend(rows)
        return [None] * len(rows)

    gradable(prompts_of("1", "2", "1", 1), "exact", check, drop=False)
    assert asked == [{"answer": "1"}, {"answer": "2"}, {"answer": 1}]
    gradable(prompts_of("1", "2"), "any:function", check, drop=False)
    assert asked[3:] == [dict.fromkeys(["prompt", "solution", "answer"])]


def test_graders_check_rows_in_their_own_processes():
    answers = ["1", float("nan"), "", "2"]
    with GraderPool(RewardSection(name="exact", workers=2)) as pool:
        reasons = pool.check([{"answer": answer} for answer in answers])
        with pytest.raises(DataError, match=r"row 1, column 'solution': .* is nan"):
            gradable(prompts_of(*answers), "exact", pool.check, drop=False)
    assert [why is None for why in reasons] == [True, False, False, True]
    assert "is nan, expected text or a finite number" in str(reasons[1])
