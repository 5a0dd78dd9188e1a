"""Environments of each form: what they are given, and what their answers become."""

import random
import sys
import types
from typing import Any

import pytest

from longtail.errors import ConfigError, GradingError
from longtail.rl.environments import python_tool
from longtail.rl.environments.guess import Guess
from longtail.rl.environments.session import Reply, Session

USER = {"role": "user", "content": "on"}


class Text:
    """A text environment that answers what a test has set."""

    answer: Any = None

    def reset(self, question: str, seed: int) -> Any:
        return [{"role": "system", "content": question}, {**USER, "content": str(seed)}]

    def step(self, text: str) -> Any:
        return self.answer


class Gymnasium(Text):
    def reset(self, **row: Any) -> Any:
        self.drawn = random.random()  # noqa: TID251 - as games do
        return f"{row}", {"info": 1}


class Counter:
    """An environment of TRL's documentation, and what else its classes may have."""

    def reset(self, **kwargs) -> str | None:
        self.counter = 0
        return kwargs.get("start")

    def increment(self, step: int) -> int:
        """Increment the internal counter.

        Args:
            step: Value to add to the internal counter.
        """
        self.counter += step
        return self.counter

    async def look(self) -> list:
        """Look at the counter."""
        return [{"type": "text", "text": f"{self.counter} \ud83d"}]

    async def get_reward(self) -> float:
        return float(self.counter)


def multiply(a: int, b: int) -> int:
    """Multiply two integers.

    Args:
        a: The first integer.
        b: The second integer.
    """
    return a * b


def untyped(a):
    """Do nothing."""


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("here")
    module.__dict__.update(globals(), Empty=type("Empty", (), {"reset": lambda self: None}))
    monkeypatch.setitem(sys.modules, "here", module)


def opened(name: str, *tools: str, calls: str = "hermes") -> Session:
    return Session(name and f"here:{name}", [f"here:{each}" for each in tools], calls)


def call(name: str, arguments: str = "{}") -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def test_reset_takes_the_columns_that_it_names_and_the_seed():
    row = {"question": "6*7", "other": 1}
    messages = ({"role": "system", "content": "6*7"}, {"role": "user", "content": "5"})
    assert opened("Text").reset(row, 5) == Reply(messages=messages)
    assert opened("Text").reset({**row, "seed": 3}, 5).messages[1]["content"] == "3"
    session = opened("Gymnasium")
    assert session.reset(row, 5).messages == ({**USER, "content": str({"seed": 5, **row})},)
    drawn = session._environment.drawn
    session.reset(row, 5)
    assert session._environment.drawn == drawn


def test_a_step_has_the_reward_of_its_turn():
    session = opened("Text")
    for answer, reply in {
        ("on", 1, False): Reply(messages=(USER,), reward=1.0),
        ("on", 0.5, False, True, ()): Reply(messages=(USER,), reward=0.5, done=True),
        (None, -1, True): Reply(reward=-1.0, done=True),
    }.items():
        session._environment.answer = answer
        assert session.step("text") == reply
    assert session.finish() == Reply(done=True)


IMAGE = [{"role": "user", "content": [{"type": "image"}]}]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("on", r"step returned 'on', not \(observation, reward, done\)"),
        (("on", None, False), "step returned None"),
        ((None, 0, False), "step returned no observation, and the episode goes on"),
        (({"text": "on"}, 0, False), "step returned {'text': 'on'}, not a text, None or messages"),
        (([{**USER, "role": "assistant"}], 0, False), "one of the roles user, tool, system"),
        ((IMAGE, 0, False), "step returned .* models here read text, no images"),
    ],
)
def test_an_answer_of_another_form_is_refused(answer, why):
    session = opened("Text")
    session._environment.answer = answer
    with pytest.raises(GradingError, match=why):
        session.step("text")


def test_an_environment_of_trls_documentation_runs_as_it_is():
    session = opened("Counter", "multiply")
    tools = [tool["function"] for tool in session.tools()]
    assert [tool["name"] for tool in tools] == ["multiply", "increment", "look"]
    step = {"type": "integer", "description": "Value to add to the internal counter."}
    assert tools[1]["parameters"]["properties"] == {"step": step}
    assert session.reset({"start": "on", "prompt": []}, 0) == Reply(messages=(USER,))
    text = call("increment", '{"step": 4}') + call("look") + call("multiply", '{"a": 2, "b": 3}')
    reply = session.step(text + call("no") + call("increment") + call("increment", "[]"))
    assert (reply.calls, reply.bad_calls, reply.done) == (6, 3, False)
    assert [(each["name"], each["content"].partition(" 1 ")[0]) for each in reply.messages] == [
        ("increment", "4"),
        ("look", "4 ?"),
        ("multiply", "6"),
        ("no", "{'error': 'Tool no not found.'}"),
        ("increment", "{'error': \"Counter.increment() missing"),
        ("increment", "{'error': 'The arguments of the call are not an object.'}"),
    ]
    assert session.step("four") == Reply(reward=4.0, done=True)
    session.close()


def test_functions_alone_are_an_environment_and_get_arguments_of_their_types():
    session = opened("", "multiply", calls="qwen3-coder")
    assert session.reset({"a": 1}, 0) == Reply()
    text = "<function=multiply><parameter=a>6</parameter><parameter=b>7</parameter></function>"
    assert session.step(text).messages[0]["content"] == "42"
    assert session.step("42") == Reply(done=True)


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (("Reply",), "'here:Reply': it has no reset; expected reset and step, or reset, "),
        (("Empty",), "'here:Empty': it has no step, and no public method that is a tool; "),
        (("multiply",), r"'here:multiply': TypeError: multiply\(\) missing 2"),
        (("Texts",), r"'here:Texts': .*did you mean Text"),
        (("", "untyped"), r"a tool has no schema \(.*missing a type hint.*untyped"),
    ],
)
def test_what_has_not_the_methods_is_refused_in_one_sentence(names, why):
    with pytest.raises(ConfigError, match=f"^environment.*{why}"):
        opened(*names).tools()


def test_the_game_of_the_recipe_rewards_guesses_that_can_be_right():
    game = Guess()
    assert game.reset(seed=3).endswith("one number.")  # the number is 8
    found = [game.step(text) for text in ("It is 8.", "4", "3", "12")]
    assert [said for said, _, _ in found] == [
        "Answer with one number.", "Higher.", "Higher.", "Lower."
    ]  # fmt: skip
    assert [reward for _, reward, _ in found] == [0.0, 0.1, 0.0, 0.1]
    said, reward, is_over = game.step(" 8\n")
    assert (said, round(reward, 6), is_over) == ("Right.", 0.4, True)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("print(6 * 7)", "42"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("x = 1", "The program printed nothing."),
        ("while True: pass", "The program did not end in 1 s."),
    ],
)
def test_the_python_tool_returns_what_a_program_prints(monkeypatch, code, said):
    monkeypatch.setattr(python_tool, "_MAX_S", 1.0)
    assert python_tool.python(code) == said
