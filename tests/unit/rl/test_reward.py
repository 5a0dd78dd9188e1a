import sys
from contextlib import nullcontext
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from longtail.errors import ConfigError, GradingError
from longtail.rl.grading.answers import (
    checked_number,
    final_answer,
    last_boxed,
    last_number,
    tagged_answer,
    whole_number,
)
from longtail.rl.grading.reward import GradingTask, reward_factory


def task(text, answer="42", prompt="6*7=", **data):
    return GradingTask(
        prompt=prompt, text=text, tokens=(5, 1), data={"prompt": prompt, "answer": answer, **data}
    )


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("5 x 2 = 10, so she pays $1,210.50.", "2421/2"),
        ("= \u22123", "-3"),
        ("10-3", "3"),
        ("(4)-3", "3"),
        ("10 -3", "-3"),
        ("-$5", "-5"),
        ("1,23", "23"),
        ("1,2345", "2345"),
        ("12,345,678.9", "123456789/10"),
        ("3.50", "7/2"),
        ("-.5", "-1/2"),
        ("2.5E-3", "1/400"),
        ("3/4", "3/4"),
        (r"-\dfrac{3}{4}", "-3/4"),
        ("1 1/2", "1/2"),
        ("3/0", None),
        ("12/25/2024", "2024"),
        ("50%", "50"),
        ("7 parts of H2O", "7"),
        ("答案是42。", "42"),
        ("", None),
        ("9" * 5000, None),
    ],
)
def test_the_last_number_of_a_text_has_an_exact_value(text, number):
    assert last_number(text) == (None if number is None else Fraction(number))


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *(("$1,000", "1000"), (" 5 % ", "5"), ("-3/4", "-3/4"), ("1e-07", "1/10000000")),
        *((text, None) for text in ("18 dollars", "3/0", "", "1,23", "x", "1 2", "9" * 5000)),
    ],
)
def test_a_reference_is_one_number(text, number):
    assert whole_number(text) == (None if number is None else Fraction(number))


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (" 42\n", "42"),
        ("a  b\tc\n d", "a b c d"),
        ("first #### 41\nthen #### 42\nDone.", "42"),
        ("####\n42", "42"),
        (r"\boxed{41} so \boxed{\frac{4}{2}}.", r"\frac{4}{2}"),
        ("<answer>41</answer> <answer> 42 </answer>", "42"),
        ("<think>#### 41</think> 42", "42"),
        (r"<answer>so \boxed{42}</answer>", "42"),
        (r"\boxed{41} #### 42", "42"),
        (r"\boxed{42", r"\boxed{42"),
        ("<think>42", "<think>42"),
    ],
)
def test_the_final_answer_is_found_in_any_of_the_usual_marks(text, answer):
    assert final_answer(text) == answer


def test_the_last_box_is_balanced_and_a_tagged_answer_keeps_drawings():
    assert last_boxed(r"\boxed{a} \boxed{\{b\}}") == r"\{b\}"
    assert last_boxed(r"\boxed{a} \boxed{b") is None
    assert last_boxed("none") is None
    assert last_boxed(r"\boxed{a} \fbox {b} in \boxed form") == "b"
    assert last_boxed(r"$\boxed 4$ or $\boxed \frac12$, so") == r"\frac12"
    assert tagged_answer("<think>no</think><answer>\n####\n#  #\n</answer>") == "####\n#  #"


def named(name):
    if name == "math_verify":
        pytest.importorskip("math_verify")
    return reward_factory(name)()


@pytest.mark.parametrize(
    ("name", "text", "answer", "reward"),
    [
        ("last_number", "I add 3 and 4. The sum is 7.00", 7, 1.0),
        ("last_number", "<think>7</think> none", "7", 0.0),
        ("last_number", "1,234", "A long solution\n#### 1234", 1.0),
        ("last_number", "0.33", "1/3", 0.0),
        ("last_number", "", "0", 0.0),
        ("last_number", "so it is 0.1", 0.1, 1.0),
        ("exact", "#### 42", "Six sevens.\n#### 42", 1.0),
        ("exact", "42", 42.0, 1.0),
        ("exact", "42 apples", "42", 0.0),
        ("exact", "", "42", 0.0),
        ("exact", r"\fbox{42}", r"so \boxed {42}", 1.0),
        ("math_verify", r"\boxed{1/2}", "0.5", 1.0),
        ("math_verify", r"$1 + x^2$", "x^2+1", 1.0),
        ("math_verify", r"\boxed{\{2, 1\}}", r"\{1,2\}", 1.0),
        ("math_verify", "<think>$7$</think> x = -3", "-3", 1.0),
        ("math_verify", r"\boxed{3}", "We find $x=3$.", 1.0),
        ("math_verify", r"\fbox{3}, not 4", "3", 1.0),
        ("math_verify", r"\boxed{x < 3}", "0.5", 0.0),
        ("math_verify", r"\boxed{\int_0^", "0.5", 0.0),
    ],
)
def test_a_completion_is_compared_with_the_reference(name, text, answer, reward):
    assert named(name).grade(task(text, answer)) == reward


@pytest.mark.parametrize(
    ("text", "opens", "reward"),
    [
        ("7", False, 1.0),
        ("7", True, 0.0),
        ("hm</think>7", True, 1.0),
        ("<think>7", False, 0.0),
        ("<think>hm</think>7", False, 1.0),
        ("<think>hm</think> I <think> it is 7", False, 0.0),
    ],
)
def test_a_text_that_ends_within_its_thought_has_no_answer(text, opens, reward):
    given = replace(task(text, "7"), opens_thought=opens)
    for name in ("last_number", "exact"):
        assert named(name).grade_group([given]) == [reward]


@pytest.mark.parametrize(
    ("name", "answers"),
    [
        ("last_number", ["18 dollars", "yes", "", None, float("nan"), "3/0"]),
        ("exact", [None, "", "  ", ["42"], {"a": 1}]),
        ("math_verify", [None, "$$", "NaN", " nan ", ""]),
    ],
)
def test_a_row_without_a_usable_reference_is_refused(name, answers):
    for answer in answers:
        with pytest.raises(GradingError, match=rf"'{name}'.*reference answer"):
            named(name).check({"answer": answer})


def test_reasoning_gym_scores_the_tagged_answer_with_the_tasks_own_scorer():
    gym = pytest.importorskip("reasoning_gym")
    reward = reward_factory("reasoning_gym")()
    for name in ("chain_sum", "rearc"):  # rearc's scorer distinguishes tuples from lists
        entry = gym.create_dataset(name, size=1, seed=3)[0]
        data = {"reasoning_gym_task": name, "reasoning_gym_entry": entry}
        right = f"<think>hm</think><answer>\n{entry['answer']}\n</answer>"
        assert reward.grade(task(right, **data)) == 1.0
        assert reward.grade(task("<answer>what?</answer>", **data)) < 0.1


ECHO = """
calls = []
def echo(prompts, completions, completion_ids, **columns):
    calls.append((prompts, completions, completion_ids, columns))
    return [0.25]
"""


USER, ASSISTANT = {"role": "user", "content": "6*7="}, {"role": "assistant", "content": "so 42"}


@pytest.mark.parametrize(("prompt", "completion"), [("6*7=", "so 42"), ([USER], [ASSISTANT])])
def test_a_function_sees_lists_of_one_with_every_column(module, prompt, completion):
    name = module(ECHO, "echo")
    asked = [task("so 42", prompt=prompt, level=3)]
    assert reward_factory(f"{name}:echo")().grade_group(asked) == [0.25]
    columns = {"answer": ["42"], "level": [3]}
    assert sys.modules[name].calls == [([prompt], [completion], [[5, 1]], columns)]


ASYNC = """
import asyncio
ready = asyncio.Event()  # is of the loop that first waits for it
async def f(completions, **columns):
    ready.set()
    await asyncio.gather(ready.wait(), asyncio.sleep(0))
    return [0.5]
class Called:
    async def __call__(self, completions, **columns): return await f(completions)
called = Called()
"""


@pytest.mark.parametrize("function", ["f", "called"])
def test_an_async_function_is_awaited_in_one_loop(module, function):
    reward = reward_factory(f"{module(ASYNC, 'awaited')}:{function}")()
    with reward.runner:
        assert [reward.grade_group([task("42")]) for _ in range(2)] == [[0.5]] * 2


@pytest.mark.parametrize(
    ("returned", "complaint"),
    [
        ("[None]", "returned None: it does not apply"),
        ("[float('nan')]", "returned nan, not a finite number"),
        ("['1.0']", "returned str '1.0', not a number"),
        ("[1.0, 0.0]", "returned 2 rewards for 1 completion"),
        ("1.0", "returned float 1.0, not a list"),
        ("'1'", "returned str '1', not a list"),
        ("{0: 1.0}", "returned dict {0: 1.0}, not a list"),
    ],
)
def test_a_function_that_answers_nonsense_gives_no_reward(module, returned, complaint):
    name = module(f"def f(**columns): return {returned}", "nonsense")
    try:
        (error,) = reward_factory("nonsense:f")().grade_group([task("42")])
    except GradingError as raised:  # for the whole group
        error = raised
    assert str(error).startswith(f"reward '{name}:f' {complaint}")


@pytest.mark.parametrize("value", [True, np.float32(1), np.int64(1), np.array(1.0)])
def test_any_real_number_is_a_reward(value):
    assert checked_number(value, source="it") == 1.0
    assert type(checked_number(value, source="it")) is float


@pytest.mark.parametrize("name", ["exact_match", "", "a b:c", "m:", ":f", "m:f()"])
def test_an_unknown_reward_lists_the_known_ones(name):
    match = r"reward\.name = .*: unknown.*exact, last_number, .*reasoning_gym, and mod"
    with pytest.raises(ConfigError, match=match):
        reward_factory(name)


@pytest.mark.parametrize(
    ("source", "error", "why"),
    [
        (None, ConfigError, "no module broken is in the working dir"),
        ("import nothing.here", ConfigError, "broken imports nothing, which is not installed$"),
        ("def f(:", ConfigError, r": SyntaxError: [^()]* \(broken\.py:1\)$"),
        ("def accuracy(**columns): ...", ConfigError, "'acuracy' \\(did you mean accuracy"),
        ("acuracy = 3", ConfigError, "it is of type int, not a function"),
        ("def acuracy(text): ...", GradingError, "unexpected .*'prompts'; it gets prompts, "),
    ],
)
def test_a_function_that_cannot_be_used_is_named(module, source, error, why):
    if source is not None:
        module(source, "broken")
    with pytest.raises(error, match=why):
        reward_factory("broken:acuracy")()


@pytest.mark.parametrize(
    ("parameters", "missing"),
    [
        ("answer, **columns", None),
        ("prompts, completions, completion_ids, answer, level=0", None),
        ("text, **columns", "a required argument: 'text'; it gets .*completion_ids, answer by"),
        ("prompts, completions, completion_ids", "unexpected keyword argument 'answer'"),
    ],
)
def test_parameters_that_do_not_fit_a_row_are_refused(module, parameters, missing):
    reward = reward_factory(f"{module(f'async def f({parameters}): ...', 'params')}:f")()
    with nullcontext() if missing is None else pytest.raises(GradingError, match=missing):
        reward.check({"prompt": None, "answer": None})
