"""Grading of completions in processes that can be killed.

A task is one completion or, for rewards that compare them, all completions of a prompt. A
completion whose grader raises, hangs, dies or returns an invalid result is a `GradingFailure`,
never a reward of 0. pebble owns the processes: it kills and replaces one that exceeds the time of
its task, while the others continue. `longtail.rl.grading.grader` is what runs in them.
"""

import os
import pickle
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import groupby
from multiprocessing import get_context
from typing import Any, final

from pebble import ProcessExpired, ProcessFuture, ProcessPool

from longtail.errors import ConfigError, GradingError
from longtail.rl.data.requests import visit_of
from longtail.rl.grading import grader
from longtail.rl.grading.reward import GradingTask, reward_factory
from longtail.types import Completion, GradingFailure, Prompt, Rollout

MAX_BREAKDOWNS = 3
"""Consecutive times that all graders may end without a result before grading is given up."""

_CHECKED_TOGETHER = 256
"""Rows that one call checks."""
_KILLING_S = 30.0
"""Most seconds between two tasks of a grader that was killed, without its start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Graded:
    """Result of grading a list of completions, each in exactly one field, in input order.

    Example: of 3 completions, the second of which hung its grader:
        Graded(rollouts=(first, third), failures=(GradingFailure(..., error="no result in 10 s"),))
    """

    rollouts: tuple[Rollout, ...]
    failures: tuple[GradingFailure, ...]


@final
class GraderPool:
    """Grader processes for one reward; a context manager, for use by one thread.

    With `by_group` a task is all completions of one prompt, graded in one call; else it is one
    completion. The time limit is that of a task.

    The constructor starts the processes; `wait_ready` (or the first `grade`) waits for them.
    `close` ends all of them.
    """

    def __init__(
        self,
        reward_name: str,
        *,
        workers: int = 1,
        timeout_s: float = 10.0,
        start_timeout_s: float = 120.0,
        by_group: bool = False,
    ) -> None:
        reward_factory(reward_name)  # raises for an unknown name before any process starts
        self._reward_name, self._num_workers, self._by_group = reward_name, workers, by_group
        self._timeout_s, self._start_timeout_s = timeout_s, start_timeout_s
        self._was_ready = False
        self._pool: ProcessPool | None = None
        self._schedule(grader.is_ready, [()])

    def __enter__(self) -> "GraderPool":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill every grader; closing twice has no effect."""
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()
            self._pool = None

    def wait_ready(self) -> None:
        """Wait until one grader has loaded the reward.

        Raises `ConfigError` with the reason if the reward cannot be loaded.
        """
        if not self._was_ready:
            self._run(grader.is_ready, [()])
            self._was_ready = True

    def grade(self, pairs: Sequence[tuple[Prompt, Completion]]) -> Graded:
        """Grade each task within the time limit; return rewards and failures in order.

        Raises `ConfigError` if the reward cannot be loaded, and `GradingError` if graders can no
        longer be started.
        """
        self.wait_ready()
        tasks = [_task(*pair) for pair in pairs]
        if self._by_group:
            outcomes = self._grade_groups(pairs, tasks)
        else:
            outcomes = self._run(grader.grade, [(task,) for task in tasks])
        rollouts, failures = [], []
        for (prompt, completion), outcome in zip(pairs, outcomes, strict=True):
            if isinstance(outcome, str):
                failure = GradingFailure(prompt=prompt, completion=completion, error=outcome)
                failures.append(failure)
            else:
                rollouts.append(Rollout(prompt=prompt, completion=completion, reward=outcome))
        return Graded(rollouts=tuple(rollouts), failures=tuple(failures))

    def _grade_groups(
        self, pairs: Sequence[tuple[Prompt, Completion]], tasks: Sequence[GradingTask]
    ) -> list[float | str]:
        """Grade completions, which are in the order of requests, in whole groups."""
        visits = [visit_of(completion.request_id) for _, completion in pairs]
        groups = [
            [task for _, task in members]
            for _, members in groupby(zip(visits, tasks, strict=True), key=lambda pair: pair[0])
        ]
        outcomes = self._run(grader.grade_group, [(group,) for group in groups])
        return [
            outcome
            for group, whole in zip(groups, outcomes, strict=True)
            for outcome in ([whole] * len(group) if isinstance(whole, str) else whole)
        ]

    def check(self, rows: Sequence[Mapping[str, Any]]) -> dict[int, str]:
        """Return, by index, why some rows cannot be graded for any completion.

        A row has the columns that `required_columns` names. Raises as `grade` does.
        """
        self.wait_ready()
        parts = [
            [dict(row) for row in rows[start : start + _CHECKED_TOGETHER]]
            for start in range(0, len(rows), _CHECKED_TOGETHER)
        ]
        reasons: list[str | None] = []
        for part, found in zip(
            parts, self._run(grader.check_rows, [(part,) for part in parts]), strict=True
        ):
            reasons += [found] * len(part) if isinstance(found, str) else found
        return {index: why for index, why in enumerate(reasons) if why is not None}

    def _run(self, function: Callable[..., Any], tasks: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Return the outcome of each task; of one that ends its grader, a text that says why."""
        outcomes: dict[int, Any] = {}
        breakdowns = 0
        while len(outcomes) < len(tasks):
            missing = [number for number in range(len(tasks)) if number not in outcomes]
            try:
                futures = self._schedule(function, [tasks[number] for number in missing])
                self._collect(dict(zip(missing, futures, strict=True)), outcomes)
            except BrokenProcessPool as error:
                self.close()
                breakdowns = 1 if len(outcomes) > len(tasks) - len(missing) else breakdowns + 1
                if breakdowns == MAX_BREAKDOWNS:
                    raise GradingError(
                        f"reward.name = {self._reward_name!r}, reward.workers = "
                        f"{self._num_workers}: the graders ended {breakdowns} times in a row "
                        f"before they had graded anything ({error}); see what they wrote to "
                        "stderr, and if memory is short, lower reward.workers"
                    ) from error
            except BaseException:  # an interruption: these tasks must not reach a later call
                self.close()
                raise
        return [outcomes[number] for number in range(len(tasks))]

    def _schedule(
        self, function: Callable[..., Any], tasks: Sequence[tuple[Any, ...]]
    ) -> list[ProcessFuture[Any]]:
        if self._pool is None:
            self._pool = ProcessPool(
                max_workers=self._num_workers,
                initializer=grader.start,
                initargs=(self._reward_name, _search_path()),
                context=get_context("forkserver"),
            )
        try:
            return [self._pool.schedule(function, task, timeout=self._timeout_s) for task in tasks]
        except RuntimeError as error:  # pebble's, if all graders ended without a task
            raise BrokenProcessPool(str(error)) from error

    def _collect(self, futures: Mapping[int, ProcessFuture[Any]], outcomes: dict[int, Any]) -> None:
        """Wait for each task; raise BrokenProcessPool, after the others, if some have no end."""
        broken = None
        for number, future in futures.items():
            try:
                outcomes[number] = self._outcome(future)
            except BrokenProcessPool as error:
                if not future.done():
                    raise
                broken = error
        if broken is not None:
            raise broken

    def _outcome(self, future: ProcessFuture[Any]) -> Any:
        # All earlier tasks have ended, so this one has begun or begins when a grader has started.
        patience = self._timeout_s + _KILLING_S if self._was_ready else 0.0
        try:
            return future.result(self._start_timeout_s + patience)
        except TimeoutError as error:
            if future.done():
                return f"the grader gave no result in {self._timeout_s:g} s and was killed"
            if self._was_ready:
                raise BrokenProcessPool("no grader takes a task") from error
            raise ConfigError(
                f"reward.name = {self._reward_name!r}: no grader has loaded it in "
                f"{self._start_timeout_s:g} s"
            ) from error
        except ProcessExpired as error:
            return f"the grader {_describe_end(error.exitcode)} while grading"
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            return f"the row cannot be sent to a grader: {error}"


def _task(prompt: Prompt, completion: Completion) -> GradingTask:
    return GradingTask(
        prompt=prompt.data.get("prompt", prompt.text),
        text=completion.text,
        tokens=completion.tokens,
        data=dict(prompt.data),
    )


def _describe_end(code: int) -> str:
    """Return an exit code in words.

    Example: _describe_end(-9) == "was killed by SIGKILL"
    """
    return (
        f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
    )


def _search_path() -> list[str]:
    """Return the search path for rewards: sys.path with the working directory moved to its end."""
    here = os.getcwd()
    return [*(entry for entry in sys.path if os.path.realpath(entry or here) != here), here]
