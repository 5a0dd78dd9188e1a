"""Grading of completions in processes that can be killed.

A task is one completion or, for rewards that compare them, all completions of a prompt. A
completion whose grader raises, hangs, dies or returns an invalid result is a `GradingFailure`,
never a reward of 0. A process that exceeds the time of its task is killed and replaced, while the
others continue. `longtail.rl.grading.reward.Grader` is what runs in them.
"""

import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, final

from longtail.config.rewards import RewardSection
from longtail.errors import ConfigError, DataError
from longtail.model.hf.chat import opens_thought
from longtail.rl.data.prompts import PromptSet
from longtail.rl.data.requests import visit_of
from longtail.rl.grading.reward import GradingTask, required_columns, reward_factory
from longtail.rl.processes.pool import ProcessPool
from longtail.rl.processes.process import Program
from longtail.system import machine
from longtail.types import Completion, GradingFailure, Prompt, Rollout

_KINDS = {"grade": list[float | str], "check": list[str | None]}
_CHECKED_TOGETHER = 256
"""Rows that are checked in one task."""
_WAIT_S = 60.0
_GRADER_BYTES = 42 * 2**20
"""Memory of a grader that has loaded no more than longtail."""
_GRADERS_PER_CORE = 32
"""Most graders per core: those of a reward that waits for a network, and starts in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Graded:
    """Result of grading a list of completions, each in exactly one field, in input order."""

    rollouts: tuple[Rollout, ...]
    failures: tuple[GradingFailure, ...]


@final
class GraderPool(ProcessPool):
    """Grader processes for one reward.

    With `per = "group"` a task is all completions of one prompt, graded in one call; else it is one
    completion. The time limit is that of a task.

    Raises ConfigError for an unknown reward before any process starts. `wait_ready` waits until the
    first has loaded the reward; others are started when they are needed.
    """

    def __init__(self, own: RewardSection) -> None:
        reward_factory(own.name)
        _check_room(own.workers)
        self._own = own
        program = Program(
            field=f"reward.name = {own.name!r}",
            make="longtail.rl.grading.reward:Grader",
            arguments=(own.name,),
        )
        super().__init__(program, _KINDS, most=own.workers, call_s=own.timeout_s)

    def wait_ready(self) -> None:
        """Wait until one grader has loaded the reward. Raises `ConfigError` if it cannot."""
        self.first("check", [])

    def grade(self, pairs: Sequence[tuple[Prompt, Completion]]) -> Graded:
        """Grade each task within the time limit; return rewards and failures in order.

        With `per = "group"`, completions are in the order of requests.
        """
        visits = [visit_of(completion.request_id) for _, completion in pairs]
        tasks = [_task(prompt, completion) for prompt, completion in pairs]
        keyed = zip(visits if self._own.per == "group" else range(len(pairs)), tasks, strict=True)
        parts = [[task for _, task in members] for _, members in groupby(keyed, itemgetter(0))]
        outcomes = self._run("grade", parts)
        rollouts, failures = [], []
        for (prompt, completion), outcome in zip(pairs, outcomes, strict=True):
            if completion.episode is not None and completion.episode.problem:
                outcome = completion.episode.problem
            if isinstance(outcome, str):
                failure = GradingFailure(prompt=prompt, completion=completion, error=outcome)
                failures.append(failure)
            else:
                rollouts.append(Rollout(prompt=prompt, completion=completion, reward=outcome))
        return Graded(rollouts=tuple(rollouts), failures=tuple(failures))

    def check(self, rows: Sequence[Mapping[str, Any]]) -> list[str | None]:
        """Return, for each row, why no completion of it can be graded; None if one can.

        A row has the `required_columns`; without any, all as None. Raises as `wait_ready` does.
        """
        self.wait_ready()
        starts = range(0, len(rows), _CHECKED_TOGETHER)
        parts = [[dict(row) for row in rows[at : at + _CHECKED_TOGETHER]] for at in starts]
        return self._run("check", parts)

    def _run(self, method: str, parts: Sequence[list[Any]]) -> list[Any]:
        """Return the outcome of each item of each part, which is a task.

        That of a task that fails is a text that says why.
        """
        tasks = {str(number): part for number, part in enumerate(parts)}
        waiting, outcomes = deque(tasks), dict[str, list[Any]]()
        try:
            while len(outcomes) < len(tasks):
                while waiting and self.num_free:
                    key = waiting.popleft()
                    self.begin(key, method, tasks[key])
                for key, found in self.answers(_WAIT_S):
                    failed = [found] * len(tasks[key])
                    outcomes[key] = failed if isinstance(found, str) else found
                    self.end(key)
        except BaseException:  # after an interruption, these tasks must not reach a later call
            self.close()
            raise
        return [each for key in tasks for each in outcomes[key]]


def _task(prompt: Prompt, completion: Completion) -> GradingTask:
    episode = completion.episode
    return GradingTask(
        prompt=prompt.data.get("prompt", prompt.text),
        text=completion.text,
        tokens=completion.tokens,
        turns=() if episode is None else episode.messages,
        rewards=() if episode is None else episode.rewards,
        opens_thought=opens_thought(prompt.text),
        data=dict(prompt.data),
    )


def _check_room(workers: int) -> None:
    """Raise ConfigError if there are too many graders for the memory or the cores of this host."""
    cores, free = machine.usable_cores(), machine.memory().available
    most = max(1, min(cores * _GRADERS_PER_CORE, (free or sys.maxsize) // _GRADER_BYTES))
    if workers > most:
        memory = "" if free is None else f" and {free / 2**30:.1f} GiB of free memory"
        raise ConfigError(
            f"reward.workers = {workers}: each is a process of {_GRADER_BYTES >> 20} MiB, and this "
            f"host has {cores} cores{memory}; lower it to at most {most}"
        )


Check = Callable[[Sequence[Mapping[str, Any]]], Sequence[str | None]]
"""Map rows, reduced to what `GraderPool.check` needs, to reasons why they cannot be graded."""


def gradable(prompts: PromptSet, reward_name: str, check: Check, *, drop: bool) -> PromptSet:
    """Return the prompts whose completions the reward can grade.

    Rows that are equal in what is checked are checked once.

    Raises DataError naming the first row that cannot be graded; with `drop`, only if none can.
    """
    columns = required_columns(reward_name)
    reasons: dict[int, str] = {}
    equal_rows: dict[str, tuple[dict[str, Any], list[int]]] = {}
    for index, prompt in enumerate(prompts.prompts):
        missing = [name for name in columns if prompt.data.get(name) is None]
        if missing:
            reasons[index] = (
                f"reward.name = {reward_name!r} needs {missing[0]!r}, which this row lacks (it has "
                f"{', '.join(prompt.data)})"
            )
        else:
            row = {name: prompt.data[name] for name in columns} or dict.fromkeys(prompt.data)
            equal_rows.setdefault(repr(row), (row, []))[1].append(index)
    reduced = list(equal_rows.values())
    for (_, indices), why in zip(reduced, check([row for row, _ in reduced]), strict=True):
        reasons |= {} if why is None else dict.fromkeys(indices, why)
    if reasons and (not drop or len(reasons) == len(prompts.prompts)):
        raise DataError(_error_text(prompts, reasons))
    kept = [index for index in range(len(prompts.prompts)) if index not in reasons]
    return prompts.part(kept)


def _error_text(prompts: PromptSet, reasons: Mapping[int, str]) -> str:
    first, *others = sorted(reasons)
    column = "" if prompts.answer_column is None else f", column {prompts.answer_column!r}"
    more = f"; {len(others)} more of {len(prompts.prompts)} rows have such faults" if others else ""
    return (
        f"data.source = {prompts.source!r}, row {prompts.rows[first]}{column}: {reasons[first]}"
        f"{more}; correct the data, name the column of the answers in data.answer_column, choose "
        "another reward.name, or set data.drop_ungradable = true to leave such rows out"
    )
