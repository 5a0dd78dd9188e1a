"""The rewards and their names: pure functions from one completion to one number.

They run in grader processes, as a `Grader`, so this module imports neither torch nor
`longtail.types`; `longtail.rl.grading.pool` owns the processes, their time limits and failures.
"""

import abc
import asyncio
import inspect
import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, ClassVar, final

from longtail.errors import ConfigError, GradingError, LongtailError, describe, did_you_mean
from longtail.rl.grading.answers import (
    after_thinking,
    checked_number,
    ends_in_thought,
    final_answer,
    last_number,
    tagged_answer,
    whole_number,
    with_plain_boxes,
)
from longtail.system.machine import import_extra, is_path, module_hint, named_callable

Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class GradingTask:
    """Input of a reward: a prompt and a completion, without tensors."""

    prompt: str | Messages
    """Prompt of the source, before the chat template: text, or chat messages."""
    text: str
    """Decoded completion."""
    tokens: tuple[int, ...]
    turns: tuple[Mapping[str, str], ...] = ()
    """Turns and observations of an episode, as chat messages."""
    rewards: tuple[float, ...] = ()
    """Rewards of an episode's turns."""
    opens_thought: bool = False
    """Whether the text that the model read ends with `<think>`."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Row of the source; `answer` is the reference answer."""


class Reward(abc.ABC):
    """Grades the completions of a prompt; an error means that none of them has a reward."""

    columns: ClassVar[tuple[str, ...]] = ()
    """Keys of `GradingTask.data` without which no completion can be graded."""

    @abc.abstractmethod
    def grade_group(self, tasks: Sequence[GradingTask]) -> list[float | GradingError]:
        """Return a reward, or the reason why there is none, for each completion."""

    def check(self, data: Mapping[str, Any]) -> None:  # noqa: B027 - by default any row will do
        """Raise `GradingError` (or any error) if no completion of this row can be graded.

        `data` has at least the `columns`.
        """


class NamedReward(Reward):
    """Grades one completion by the reference in its row."""

    columns: ClassVar[tuple[str, ...]] = ("answer",)

    @abc.abstractmethod
    def grade(self, task: GradingTask) -> float:
        """Return a finite number; raise `GradingError` (or any error) if there is none."""

    @abc.abstractmethod
    def reference(self, data: Mapping[str, Any]) -> Any:
        """Return what completions of this row are compared with; raise as `check` does."""

    def grade_group(self, tasks: Sequence[GradingTask]) -> list[float | GradingError]:
        """Grade each completion; one that is cut within its thought has no answer."""
        return [
            0.0 if ends_in_thought(task.text, is_opened=task.opens_thought) else self.grade(task)
            for task in tasks
        ]

    def check(self, data: Mapping[str, Any]) -> None:
        """Refuse a row without a usable reference."""
        self.reference(data)


def _answer(data: Mapping[str, Any], reward_name: str) -> str:
    """Return the reference answer as text."""
    answer = data.get("answer")
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)
    is_finite = not isinstance(answer, float) or math.isfinite(answer)
    if is_finite and isinstance(answer, (str, int, float)) and final_answer(str(answer)):
        return str(answer)
    raise GradingError(
        f"reward {reward_name!r}: the reference answer of this row is {answer!r:.80}, expected "
        "text or a finite number"
    )


@final
class ExactReward(NamedReward):
    """1 if the final answer equals the reference's final answer, else 0."""

    def grade(self, task: GradingTask) -> float:
        """Compare final answers as text."""
        return float(final_answer(task.text) == self.reference(task.data))

    def reference(self, data: Mapping[str, Any]) -> str:
        """Return the final answer of the row's answer."""
        return final_answer(_answer(data, "exact"))


@final
class LastNumberReward(NamedReward):
    """1 if the last number of the completion equals the reference, else 0.

    `answers.last_number` defines numbers; text before the last `</think>` does not count. Values
    are compared exactly: 3.50 equals 7/2, and 0.33 does not equal 1/3.
    """

    def grade(self, task: GradingTask) -> float:
        """Compare the numbers."""
        return float(last_number(after_thinking(task.text)) == self.reference(task.data))

    def reference(self, data: Mapping[str, Any]) -> Fraction:
        """Return the number that is the row's answer."""
        answer = final_answer(_answer(data, "last_number"))
        number = whole_number(answer)
        if number is None:
            raise GradingError(
                f"reward 'last_number': the reference answer of this row is {answer!r:.80}, "
                "expected one number"
            )
        return number


@final
class MathVerifyReward(NamedReward):
    """1 if math-verify finds the completion's answer equal to the reference, else 0.

    math-verify's own time limits are off: they use SIGALRM, and grade a timeout as wrong.
    """

    def __init__(self) -> None:
        math_verify = import_extra("math_verify", "math", "reward.name = 'math_verify'")
        self._parse: Callable[..., list[Any]] = math_verify.parse
        self._verify: Callable[..., bool] = math_verify.verify
        logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that limits are off
        self._equal(self._extract("$1$"), self._extract("$1$"))  # builds the grammar, slowly

    def grade(self, task: GradingTask) -> float:
        """Compare the two mathematically, in any notation."""
        gold = self.reference(task.data)
        return float(self._equal(gold, self._extract(with_plain_boxes(after_thinking(task.text)))))

    def reference(self, data: Mapping[str, Any]) -> list[Any]:
        """Parse the row's answer."""
        answer, gold = _answer(data, "math_verify"), []
        if "$" not in answer and r"\boxed" not in answer:  # LaTeX needs a delimiter
            gold = self._extract(rf"\boxed{{{final_answer(answer)}}}")
        gold = gold or self._extract(answer)
        if not gold or answer.strip().lower() == "nan":  # math-verify parses n*a*n
            raise GradingError(
                f"reward 'math_verify' cannot parse the reference answer {answer!r:.80}"
            )
        return gold

    def _extract(self, text: str) -> list[Any]:
        return self._parse(text, parsing_timeout=None, raise_on_error=True)

    def _equal(self, gold: list[Any], answer: list[Any]) -> bool:
        # Any pair of parses may match. If none does, an error in a comparison is raised instead of
        # grading the completion as wrong.
        return self._verify(gold, answer, timeout_seconds=None) or self._verify(
            gold, answer, timeout_seconds=None, raise_on_error=True
        )


@final
class ReasoningGymReward(NamedReward):
    """Score, from 0 to 1, of the reasoning-gym task that generated the problem."""

    columns = ("reasoning_gym_task", "reasoning_gym_entry")

    def __init__(self) -> None:
        gym = import_extra("reasoning_gym", "reasoning-gym", "reward.name = 'reasoning_gym'")
        self._make_dataset: Callable[..., Any] = gym.create_dataset
        self._scorers: dict[str, Callable[..., float]] = {}

    def grade(self, task: GradingTask) -> float:
        """Score the tagged answer by the task's own scorer."""
        # NOTE: not `final_answer`: answers may contain #, as in sokoban
        answer, entry = tagged_answer(task.text), task.data["reasoning_gym_entry"]
        score = self.reference(task.data)(answer=answer, entry=entry)
        name = task.data["reasoning_gym_task"]
        return checked_number(score, source=f"reasoning_gym scorer {name!r}")

    def reference(self, data: Mapping[str, Any]) -> Callable[..., float]:
        """Return the scorer of a task with its parameters, some of which scorers use."""
        name, config = data["reasoning_gym_task"], data.get("reasoning_gym_config", {})
        key = f"{name} {sorted(config.items())}"
        if key not in self._scorers:
            self._scorers[key] = self._make_dataset(name, **config).score_answer
        return self._scorers[key]


@final
class EnvironmentReward(Reward):
    """Sum of the rewards that an environment gave for the turns of an episode."""

    def grade_group(self, tasks: Sequence[GradingTask]) -> list[float | GradingError]:
        """Add up the rewards of each episode."""
        return [sum(task.rewards) for task in tasks]


@final
class FunctionReward(Reward):
    """Result of a user's function with TRL's signature, called with the completions of one prompt.

    Its arguments are `prompts`, `completions`, `completion_ids` and every column of the row, each a
    list with one entry per completion; it returns as many numbers. None means that it does not
    apply to a completion. For chat prompts, completions are messages. An async one is awaited.
    """

    _OURS = frozenset({"prompt", "prompts", "completion", "completions", "completion_ids"})

    def __init__(self, name: str) -> None:
        self._name = name
        self.runner = asyncio.Runner()  # one loop for all calls: sessions are bound to theirs
        self._function = named_callable(name, "reward.name")
        self.check({}, inspect.Signature.bind_partial)  # columns are not known yet

    def check(self, data: Mapping[str, Any], bind: Any = inspect.Signature.bind) -> None:
        """Refuse a row whose columns the function does not take, or which lacks one it needs."""
        given = ["prompts", "completions", "completion_ids"]
        given += [key for key in data if key not in self._OURS]
        try:
            bind(inspect.signature(self._function), **dict.fromkeys(given))
        except TypeError as error:
            raise GradingError(
                f"reward.name = {self._name!r}: {error}; it gets {', '.join(given)} by name: "
                "take those that it needs, and **columns"
            ) from error
        except ValueError:
            return  # a compiled function may have no signature

    def grade_group(self, tasks: Sequence[GradingTask]) -> list[float | GradingError]:
        """Call the function once."""
        columns = [key for key in tasks[0].data if key not in self._OURS]
        rewards = self._function(
            prompts=[task.prompt for task in tasks],
            completions=[_completion(task) for task in tasks],
            completion_ids=[list(task.tokens) for task in tasks],
            **{key: [task.data[key] for task in tasks] for key in columns},
        )
        rewards = awaited(self.runner, rewards)
        source = f"reward {self._name!r}"
        is_list = isinstance(rewards, Sized) and isinstance(rewards, Iterable)
        if not is_list or isinstance(rewards, (str, bytes, Mapping)):
            kind = type(rewards).__name__
            raise GradingError(f"{source} returned {kind} {rewards!r:.80}, not a list of numbers")
        if len(rewards) != len(tasks):
            plural = "" if len(tasks) == 1 else "s"
            raise GradingError(
                f"{source} returned {len(rewards)} rewards for {len(tasks)} completion{plural}"
            )
        return [_number_or_error(reward, source) for reward in rewards]


def awaited(runner: asyncio.Runner, value: Any) -> Any:
    """Return a value of a user's function, or what it awaits."""

    async def wait_for(value: Awaitable[Any]) -> Any:
        return await value

    return runner.run(wait_for(value)) if inspect.isawaitable(value) else value


def _completion(task: GradingTask) -> str | Messages:
    """Return a completion as TRL gives it: as messages if the prompt is, or it has turns."""
    if task.turns:
        return [dict(each) for each in task.turns]
    is_text = isinstance(task.prompt, str)
    return task.text if is_text else [{"role": "assistant", "content": task.text}]


def _number_or_error(reward: object, source: str) -> float | GradingError:
    try:
        return checked_number(reward, source=source)
    except GradingError as error:
        return error


_NAMED: dict[str, type[Reward]] = {
    "environment": EnvironmentReward,
    "exact": ExactReward,
    "last_number": LastNumberReward,
    "math_verify": MathVerifyReward,
    "reasoning_gym": ReasoningGymReward,
}


def required_columns(name: str) -> tuple[str, ...]:
    """Return the keys of `GradingTask.data` that this reward needs."""
    return _NAMED[name].columns if name in _NAMED else ()


def reward_factory(name: str) -> Callable[[], Reward]:
    """Check the form of `name` and return the factory of its reward; import nothing yet.

    Raises `ConfigError` for a name that is neither known nor `module:function`; the factory raises
    it for a missing extra, a missing module, and what is not a function.
    """
    if name in _NAMED:
        return _NAMED[name]
    if is_path(name):
        return lambda: FunctionReward(name)
    raise ConfigError(
        f"reward.name = {name!r}: unknown{did_you_mean(name, _NAMED)}; known are "
        f"{', '.join(_NAMED)}, and module:function with TRL's signature{module_hint(name)}"
    )


@final
class Grader:
    """The reward of a grader process."""

    def __init__(self, name: str) -> None:
        """Load the reward. Raises ConfigError if it cannot be loaded."""
        try:
            self._reward = reward_factory(name)()
        except LongtailError:
            raise
        except BaseException as error:
            raise ConfigError(f"reward.name = {name!r}: {describe(error)}") from error

    def grade(self, tasks: Sequence[GradingTask]) -> list[float | str]:
        """Return the reward of each completion of one prompt, or why there is none."""
        outcomes = self._reward.grade_group(tasks)
        return [describe(each) if isinstance(each, GradingError) else each for each in outcomes]

    def check(self, rows: Sequence[Mapping[str, Any]]) -> list[str | None]:
        """Return, for each row, why no completion of it can be graded; None if one can."""
        reasons = list[str | None]()
        for row in rows:
            try:
                self._reward.check(row)
                reasons.append(None)
            except Exception as error:  # noqa: BLE001 - a reward may raise anything
                reasons.append(describe(error))
        return reasons
