import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longtail.errors import ConfigError, GradingError
from longtail.rl.grading.answers import (
    checked_number,
    final_answer,
    last_boxed,
    last_number,
    tagged_answer,
    whole_number,
)
from longtail.rl.grading.reward import (
    GradingTask,
    required_columns,
    resolve_reward,
    reward_factory,
)


def task(text, answer="42", prompt="6*7=", **data):
    return GradingTask(
        prompt=prompt, text=text, tokens=(5, 1), data={"prompt": prompt, "answer": answer, **data}
    )


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write a module that only this test can import; return its name."""

    def write(source, name):
        (tmp_path / f"{name}.py").write_text(source)
        return name

    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield write
    for name in set(sys.modules) - before:
        if (tmp_path / f"{name}.py").exists():
            del sys.modules[name]


# ------------------------------------------------------------------------------ last numbers


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("5 x 2 = 10, so she pays $1,210.50.", "2421/2"),
        ("it is 42.", "42"),
        ("= -3", "-3"),
        ("= \u22123", "-3"),
        ("+7", "7"),
        ("10-3", "3"),
        ("(4)-3", "3"),
        ("10 -3", "-3"),
        ("-$5", "-5"),
        ("x=-5", "-5"),
        ("1,234", "1234"),
        ("1,23", "23"),
        ("1,2345", "2345"),
        ("12,345,678.9", "123456789/10"),
        ("3.50", "7/2"),
        (".5", "1/2"),
        ("-.5", "-1/2"),
        ("1e5", "100000"),
        ("2.5E-3", "1/400"),
        ("3/4", "3/4"),
        (r"\frac{3}{4}", "3/4"),
        (r"-\dfrac{3}{4}", "-3/4"),
        (r"\boxed{-17}", "-17"),
        ("1 1/2", "1/2"),
        ("3/0", "0"),
        ("12/25/2024", "2024"),
        ("50%", "50"),
        ("5 km", "5"),
        ("7 parts of H2O", "7"),
        ("答案是42。", "42"),
        ("007", "7"),
        ("none", None),
        ("H2O", None),
        ("", None),
        ("9" * 1001, None),
    ],
)
def test_the_last_number_of_a_text_has_an_exact_value(text, number):
    assert last_number(text) == (None if number is None else Fraction(number))


@pytest.mark.parametrize(
    ("text", "number"),
    [("$1,000", "1000"), (" 5 % ", "5"), ("-3/4", "-3/4"), ("1e-07", "1/10000000")],
)
def test_a_reference_is_one_number(text, number):
    assert whole_number(text) == Fraction(number)


@pytest.mark.parametrize("text", ["18 dollars", "3/0", "", "1,23", "x", "1 2", "9" * 1001])
def test_other_references_are_no_number(text):
    assert whole_number(text) is None


@given(st.integers(-(10**12), 10**12), st.integers(0, 6))
def test_a_written_number_is_read_back(integer, digits):
    value = Fraction(integer, 10**digits)
    written = f"{integer / 10**digits:,.{digits}f}" if abs(integer) < 10**9 else f"{integer:,}"
    assert last_number(f"so 3 and then {written} in all") == (
        value if abs(integer) < 10**9 else integer
    )


@given(st.text(alphabet="0123456789.,-+/eE$\\frac{} ", max_size=200))
def test_any_text_has_a_last_number_or_none(text):
    assert last_number(text) is None or isinstance(last_number(text), Fraction)


@pytest.mark.parametrize(
    ("text", "answer", "reward"),
    [
        ("I add 3 and 4. The sum is 7.00", 7, 1.0),
        ("It is 7, as 3 + 4 = 8", "7", 0.0),
        ("<think>7</think> none", "7", 0.0),
        ("<think>8</think> 7", "7", 1.0),
        ("1,234", "A long solution\n#### 1234", 1.0),
        ("0.33", "1/3", 0.0),
        ("", "0", 0.0),
        ("9" * 5000, "9", 0.0),
        ("so it is 0.1", 0.1, 1.0),
    ],
)
def test_last_number_compares_values(text, answer, reward):
    assert resolve_reward("last_number").grade(task(text, answer)) == reward


@pytest.mark.parametrize("answer", ["18 dollars", "yes", "", None, float("nan"), "3/0"])
def test_last_number_refuses_a_row_whose_answer_is_no_number(answer):
    with pytest.raises(GradingError, match="'last_number'"):
        resolve_reward("last_number").check({"answer": answer})


# ------------------------------------------------------------------------------ final answers


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
        ("<think>a</think>b</think>42", "42"),
        (r"<answer>so \boxed{42}</answer>", "42"),
        ("<answer>#### 42</answer>", "42"),
        (r"#### \boxed{42}", "42"),
        (r"\boxed{41} #### 42", "42"),
        (r"\boxed{42", r"\boxed{42"),
        ("<answer>42", "<answer>42"),
        ("42</answer>", "42</answer>"),
        ("<think>42", "<think>42"),
        ("", ""),
    ],
)
def test_the_final_answer_is_found_in_any_of_the_usual_marks(text, answer):
    assert final_answer(text) == answer


def test_the_last_box_is_balanced():
    assert last_boxed(r"\boxed{a} \boxed{\{b\}}") == r"\{b\}"
    assert last_boxed(r"\boxed{a} \boxed{b") is None
    assert last_boxed("none") is None


def test_a_tagged_answer_keeps_drawings():
    assert tagged_answer("<think>no</think><answer>\n####\n#  #\n</answer>") == "####\n#  #"


# ------------------------------------------------------------------------------ exact match


@pytest.mark.parametrize(
    ("text", "answer", "reward"),
    [
        ("#### 42", "42", 1.0),
        ("#### 42", "Six sevens.\n#### 42", 1.0),
        ("42", 42, 1.0),
        ("42", 42.0, 1.0),
        ("0.5", 0.5, 1.0),
        ("#### 41", "42", 0.0),
        ("42 apples", "42", 0.0),
        ("", "42", 0.0),
    ],
)
def test_exact_compares_final_answers(text, answer, reward):
    assert resolve_reward("exact").grade(task(text, answer)) == reward


@pytest.mark.parametrize("answer", [None, "", "  ", ["42"], {"a": 1}])
def test_exact_refuses_a_row_without_a_reference(answer):
    with pytest.raises(GradingError, match=r"reference answer of this row is "):
        resolve_reward("exact").grade(task("42", answer))


# ------------------------------------------------------------------------------ math-verify


@pytest.fixture(scope="session")
def math_reward():
    pytest.importorskip("math_verify")
    return resolve_reward("math_verify")


@pytest.mark.parametrize(
    ("text", "answer", "reward"),
    [
        (r"\boxed{1/2}", "0.5", 1.0),
        (r"so $x = \frac12$", "1/2", 1.0),
        ("it is 1000", "#### 1,000", 1.0),
        (r"$1 + x^2$", "x^2+1", 1.0),
        (r"\boxed{\{2, 1\}}", r"\{1,2\}", 1.0),
        ("<think>$7$</think> x = -3", "-3", 1.0),
        (r"\boxed{3}", "We find $x=3$.", 1.0),
        (r"\boxed{(2,1)}", "(1,2)", 0.0),
        (r"\boxed{x < 3}", "0.5", 0.0),
        (r"\boxed{\int_0^", "0.5", 0.0),
        ("no idea", "0.5", 0.0),
        ("", "0.5", 0.0),
    ],
)
def test_math_verify_compares_mathematics(math_reward, text, answer, reward):
    assert math_reward.grade(task(text, answer)) == reward


@pytest.mark.parametrize("answer", [None, "$$", "NaN", " nan ", ""])
def test_math_verify_refuses_a_row_without_a_reference(math_reward, answer):
    with pytest.raises(GradingError, match="reference answer"):
        math_reward.check({"answer": answer})


# ------------------------------------------------------------------------------ reasoning-gym


def test_reasoning_gym_scores_the_tagged_answer_with_the_tasks_own_scorer():
    gym = pytest.importorskip("reasoning_gym")
    reward = resolve_reward("reasoning_gym")
    for name in ("chain_sum", "rearc"):  # rearc's scorer distinguishes tuples from lists
        entry = gym.create_dataset(name, size=1, seed=3)[0]
        data = {"reasoning_gym_task": name, "reasoning_gym_entry": entry}
        right = f"<think>hm</think><answer>\n{entry['answer']}\n</answer>"
        assert reward.grade(task(right, **data)) == 1.0
        assert reward.grade(task("<answer>what?</answer>", **data)) < 0.1


# ------------------------------------------------------------------------------ TRL's signature

ECHO = """
calls = []
def echo(prompts, completions, completion_ids, **columns):
    calls.append((prompts, completions, completion_ids, columns))
    return [0.25]
"""


def test_a_function_sees_lists_of_one_with_every_column(module):
    name = module(ECHO, "echo_text")
    assert resolve_reward(f"{name}:echo").grade(task("so 42", level=3)) == 0.25
    assert sys.modules[name].calls == [
        (["6*7="], ["so 42"], [[5, 1]], {"answer": ["42"], "level": [3]})
    ]


def test_chat_prompts_come_with_chat_completions(module):
    name = module(ECHO, "echo_chat")
    prompt = [{"role": "user", "content": "6*7="}]
    resolve_reward(f"{name}:echo").grade(task("so 42", prompt=prompt))
    prompts, completions, _, columns = sys.modules[name].calls[0]
    assert prompts == [prompt]
    assert completions == [[{"role": "assistant", "content": "so 42"}]]
    assert columns == {"answer": ["42"]}


@pytest.mark.parametrize(
    ("returned", "complaint"),
    [
        ("[None]", "returned None: it does not apply"),
        ("[float('nan')]", "returned nan: a reward must be finite"),
        ("[float('inf')]", "returned inf: a reward must be finite"),
        ("['1.0']", "returned str '1.0', not a number"),
        ("[1j]", "returned complex 1j, not a number"),
        ("[]", "returned 0 rewards for 1 completion"),
        ("[1.0, 0.0]", "returned 2 rewards for 1 completion"),
        ("1.0", "returned float 1.0, not a list"),
        ("None", "returned NoneType None, not a list"),
        ("'1'", "returned str '1', not a list"),
        ("{0: 1.0}", "returned dict {0: 1.0}, not a list"),
    ],
)
def test_a_function_that_answers_nonsense_gives_no_reward(module, returned, complaint):
    name = module(f"def f(**columns): return {returned}", "nonsense")
    with pytest.raises(GradingError) as caught:
        resolve_reward("nonsense:f").grade(task("42"))
    assert str(caught.value).startswith(f"reward '{name}:f' {complaint}")


@pytest.mark.parametrize("value", [1, True, 1.0, np.float32(1), np.int64(1), np.array(1.0)])
def test_any_real_number_is_a_reward(value):
    assert checked_number(value, source="it") == 1.0
    assert type(checked_number(value, source="it")) is float


# ------------------------------------------------------------------------------ names


@pytest.mark.parametrize("name", ["exact_match", "math-verify", "", "a b:c", "m:", ":f", "m:f()"])
def test_an_unknown_reward_lists_the_known_ones(name):
    match = r"reward\.name = .*: unknown.*exact, last_number, .*reasoning_gym, and mod"
    with pytest.raises(ConfigError, match=match):
        reward_factory(name)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("import no_such_package", "the module 'broken' does not import .*no_such_package"),
        ("def f(:", "does not import .*SyntaxError"),
        ("def accuracy(**columns): ...", "has no 'acuracy', did you mean 'accuracy'"),
        ("acuracy = 3", "'acuracy' is of type int, not a function"),
    ],
)
def test_a_function_that_cannot_be_used_is_named(module, source, why):
    module(source, "broken")
    with pytest.raises(ConfigError, match=why):
        resolve_reward("broken:acuracy")


def test_a_module_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match=r"module 'no_such_module' does not import.*working dir"):
        resolve_reward("no_such_module:f")


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [("math_verify", "math_verify", "math"), ("reasoning_gym", "reasoning_gym", "reasoning-gym")],
)
def test_a_missing_extra_is_named_with_its_remedy(monkeypatch, name, package, extra):
    monkeypatch.setitem(sys.modules, package, None)  # what import sees where it is not installed
    with pytest.raises(ConfigError, match=rf"pip install 'longtail\[{extra}\]'"):
        resolve_reward(name)


def test_rewards_say_which_columns_they_need():
    assert required_columns("exact") == ("answer",)
    assert required_columns("module:function") == ()


def test_rewards_and_graders_import_neither_torch_nor_numpy():
    program = (
        "import longtail.rl.grading.grader, sys;"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
