"""The interface of rewards: pure functions from one completion to one number.

It is imported in grader processes, so it imports neither torch nor `longtail.types`.
"""

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from longtail.errors import GradingError

Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class GradingTask:
    """Input of a reward: a prompt and a completion, without tensors.

    Example: GradingTask(prompt="6*7=", text="It is #### 42", tokens=(5, 1), data={"answer": "42"})
    """

    prompt: str | Messages
    """Prompt of the source, before the chat template: text, or chat messages."""
    text: str
    """Decoded completion."""
    tokens: tuple[int, ...]
    data: Mapping[str, Any] = field(default_factory=dict)
    """Row of the source; `answer` is the reference answer."""


class Reward(abc.ABC):
    """Grades one completion; an error means that the completion has no reward."""

    @abc.abstractmethod
    def grade(self, task: GradingTask) -> float:
        """Return a finite number; raise `GradingError` (or any error) if there is none."""

    def grade_group(self, tasks: Sequence[GradingTask]) -> list[float | GradingError]:
        """Return a reward, or the reason why there is none, for each completion of a prompt.

        An error that is raised means that no completion has a reward.
        """
        return [self.grade(task) for task in tasks]

    @abc.abstractmethod
    def check(self, data: Mapping[str, Any]) -> None:
        """Raise `GradingError` (or any error) if no completion of this row can be graded.

        `data` has at least the columns that `required_columns` names.
        """
