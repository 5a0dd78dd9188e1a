"""Curricula: levels of tasks that rise with the rewards of a run.

The prompts of all levels exist from the start (`rl.data.mixture`), and `PromptSource` visits those
of the present level. Levels and the rewards that they depend on are part of the source's cursor, so
a resumed run goes on at the same level.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, final

from longtail.errors import DataError
from longtail.rl.data.mixture import LEVEL, TASK
from longtail.types import Group, Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelRule:
    """Rule by which the level of one task rises.

    Example: LevelRule(levels=(0, 1, 2), raise_at=0.8, groups=32)
    """

    levels: tuple[int, ...]
    """Levels in ascending order; the first is that of the start."""
    raise_at: float
    """Mean reward at which the level rises."""
    groups: int
    """Number of groups of the present level that the mean is over."""


@final
class Curriculum:
    """Present levels of tasks, and the mean rewards of their last groups.

    Example: with groups=2 and raise_at=0.5, groups with mean rewards 0.2, 0.4, 0.6 raise the level
    after the third; the level after that depends on later groups only.
    """

    def __init__(self, rules: Mapping[str, LevelRule]) -> None:
        self._rules = dict(rules)
        self._levels = {task: rule.levels[0] for task, rule in rules.items()}
        self._recent: dict[str, list[float]] = {task: [] for task in rules}

    @property
    def levels(self) -> Mapping[str, int]:
        """Present level of each task."""
        return dict(self._levels)

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Raise DataError if a level has no prompt."""
        found = {(prompt.data.get(TASK), prompt.data.get(LEVEL)) for prompt in prompts}
        for task, rule in self._rules.items():
            for level in rule.levels:
                if (task, level) not in found:
                    raise DataError(
                        f"data.tasks: level {level} of {task!r} has no prompt left to train on; "
                        "raise data.size or data.max_prompt_len, or lower curriculum.max_level"
                    )

    def visits(self, prompt: Prompt) -> bool:
        """Return whether a prompt is of its task's present level, or of a task without levels."""
        task = prompt.data.get(TASK)
        return task not in self._levels or prompt.data[LEVEL] == self._levels[task]

    def record(self, groups: Sequence[Group]) -> list[str]:
        """Raise levels by the groups of one step, each by one at most; return a line for each."""
        for group in groups:
            task = group.prompt.data.get(TASK)
            if task in self._rules and group.prompt.data[LEVEL] == self._levels[task]:
                mean = fmean(rollout.reward for rollout in group.rollouts)
                self._recent[task] = [*self._recent[task], mean][-self._rules[task].groups :]
        return [line for task in self._rules if (line := self._raise(task)) is not None]

    def _raise(self, task: str) -> str | None:
        rule, level, recent = self._rules[task], self._levels[task], self._recent[task]
        if level == rule.levels[-1] or len(recent) < rule.groups or fmean(recent) < rule.raise_at:
            return None
        self._levels[task] = rule.levels[rule.levels.index(level) + 1]
        self._recent[task] = []
        return (
            f"{task}: level {self._levels[task]} from the next step on (mean reward "
            f"{fmean(recent):.3f} over {len(recent)} groups)"
        )

    def state(self) -> dict[str, Any]:
        """Return levels and recent rewards as JSON values."""
        return {
            task: {"level": self._levels[task], "recent": list(self._recent[task])}
            for task in self._rules
        }

    def restore(self, state: Any) -> None:
        """Continue from a saved state; DataError if it is not one of these tasks."""
        try:
            levels = {task: state[task]["level"] for task in self._rules}
            recent = {task: [float(mean) for mean in state[task]["recent"]] for task in self._rules}
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"the checkpoint's curriculum is damaged: {error!r}") from error
        if any(levels[task] not in rule.levels for task, rule in self._rules.items()):
            raise DataError(f"the checkpoint's curriculum is damaged: levels {levels}")
        self._levels, self._recent = levels, recent
