"""Grading of completions in processes that can be killed.

A task is one completion or, for rewards that compare them, all completions of a prompt. A
completion whose grader raises, hangs, dies or returns an invalid result is a `GradingFailure`,
never a reward of 0. pebble owns the processes: it kills and replaces one that exceeds the time of
its task, while the others continue. `longtail.rl.grading.grader` is what runs in them.
"""

import pickle
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from itertools import groupby
from multiprocessing import get_context
from operator import itemgetter
from typing import Any, final

from pebble import ProcessExpired, ProcessFuture, ProcessPool

from longtail.config.rewards import RewardSection
from longtail.errors import ConfigError, DataError, GradingError
from longtail.model.hf.chat import opens_thought
from longtail.rl.data.prompts import PromptSet
from longtail.rl.data.requests import visit_of
from longtail.rl.grading import grader
from longtail.rl.grading.reward import GradingTask, required_columns, reward_factory
from longtail.system import machine
from longtail.system.interrupt import signals_delayed
from longtail.types import Completion, GradingFailure, Prompt, Rollout

MAX_BREAKDOWNS = 3
"""Consecutive times that all graders may end without a result before grading is given up."""

_CHECKED_TOGETHER = 256
"""Rows that are checked in one task."""
_STARTING_S = 120.0
"""Most seconds in which a grader loads the reward."""
_KILLING_S = 30.0
"""Most seconds that killing a grader delays the next task."""
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
class GraderPool(AbstractContextManager["GraderPool"]):
    """Grader processes for one reward; a context manager, for use by one thread.

    With `per = "group"` a task is all completions of one prompt, graded in one call; else it is one
    completion. The time limit is that of a task.

    The constructor starts the processes; `wait_ready` (or the first `grade`) waits for them.
    `close` ends all of them.
    """

    def __init__(self, own: RewardSection) -> None:
        reward_factory(own.name)  # raises for an unknown name before any process starts
        _check_room(own.workers)
        self._own = own
        self._pool: ProcessPool | None = None
        try:
            with signals_delayed():  # or a process is started that `close` does not know
                self._open().schedule(grader.check, ([],))
        except BaseException:
            self.close()
            raise

    def __exit__(self, *error: object) -> None:
        self.close()

    def _open(self) -> ProcessPool:
        if self._pool is None:
            self._pool = ProcessPool(
                max_workers=self._own.workers,
                initializer=grader.start,
                initargs=(self._own.name, machine.module_path()),
                context=get_context("spawn"),  # their parent is this process, with which they end
            )
        return self._pool

    def close(self) -> None:
        """Kill every grader; closing twice has no effect."""
        if self._pool is not None:
            self._pool.stop()  # type: ignore[no-untyped-call]
            self._pool.join()
            self._pool = None

    def wait_ready(self) -> None:
        """Wait until one grader has loaded the reward.

        Raises `ConfigError` with the reason if the reward cannot be loaded, and `GradingError` if
        graders cannot be started.
        """
        self._run(grader.check, [[]])

    def grade(self, pairs: Sequence[tuple[Prompt, Completion]]) -> Graded:
        """Grade each task within the time limit; return rewards and failures in order.

        With `per = "group"`, completions are in the order of requests. Raises as `wait_ready` does.
        """
        visits = [visit_of(completion.request_id) for _, completion in pairs]
        tasks = [_task(prompt, completion) for prompt, completion in pairs]
        keyed = zip(visits if self._own.per == "group" else range(len(pairs)), tasks, strict=True)
        parts = [[task for _, task in members] for _, members in groupby(keyed, itemgetter(0))]
        outcomes = self._run(grader.grade, parts)
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

    def check(self, rows: Sequence[Mapping[str, Any]]) -> dict[int, str]:
        """Return, by index, why some rows cannot be graded for any completion.

        A row has the columns that `required_columns` names. Raises as `wait_ready` does.
        """
        starts = range(0, len(rows), _CHECKED_TOGETHER)
        parts = [[dict(row) for row in rows[at : at + _CHECKED_TOGETHER]] for at in starts]
        reasons = self._run(grader.check, parts)
        return {index: why for index, why in enumerate(reasons) if why is not None}

    def _run(self, function: Callable[..., Any], parts: Sequence[list[Any]]) -> list[Any]:
        """Return the outcome of each item of each part, which is a task.

        That of a task that ends its grader is a text that says why.
        """
        outcomes: dict[int, list[Any]] = {}
        breakdowns = 0
        try:
            while left := {n: part for n, part in enumerate(parts) if n not in outcomes}:
                found = self._attempt(function, left)
                outcomes |= found
                breakdowns = 0 if found else breakdowns + 1
                if breakdowns == MAX_BREAKDOWNS:
                    raise GradingError(
                        f"reward.name = {self._own.name!r}: the graders ended {breakdowns} "
                        "times in a row before they had graded anything; stderr has what they "
                        f"wrote, and if memory is short, lower reward.workers = {self._own.workers}"
                    )
        except BaseException:  # after an interruption, these tasks must not reach a later call
            self.close()
            raise
        return [each for number in range(len(parts)) for each in outcomes[number]]

    def _attempt(
        self, function: Callable[..., Any], tasks: Mapping[int, list[Any]]
    ) -> dict[int, list[Any]]:
        """Return the outcomes of the tasks that end; not all do if every grader ended without one.

        pebble gives its pool up when graders end that have no task.
        """
        outcomes, pool = {}, self._open()
        try:
            futures = {
                number: pool.schedule(function, (task,), timeout=self._own.timeout_s)
                for number, task in tasks.items()
            }
        except RuntimeError:
            futures = {}
        for number, future in futures.items():
            with suppress(BrokenProcessPool):
                found = self._outcome(pool, future)
                outcomes[number] = [found] * len(tasks[number]) if isinstance(found, str) else found
        if len(outcomes) < len(tasks):
            self.close()
        return outcomes

    def _outcome(self, pool: ProcessPool, future: ProcessFuture[Any]) -> Any:
        # All earlier tasks have ended, so this one has begun or begins when a grader has started.
        limit_s = _STARTING_S + self._own.timeout_s + _KILLING_S
        end = time.monotonic() + limit_s
        while not future.done():
            if not pool.active:  # pebble leaves tasks that it has not sent yet without an end
                raise BrokenProcessPool
            if time.monotonic() > end:
                raise GradingError(
                    f"reward.name = {self._own.name!r}: no grader has begun a task in "
                    f"{limit_s:g} s; see that its module is imported in that time"
                )
            wait([future], timeout=1.0)
        try:
            return future.result()
        except TimeoutError:
            return f"the grader gave no result in {self._own.timeout_s:g} s and was killed"
        except ProcessExpired as error:
            how = f"exited with status {error.exitcode}"
            if error.exitcode < 0:
                how = f"was killed by {signal.Signals(-error.exitcode).name}"
            return f"the grader {how} while grading"
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            return f"the row cannot be sent to a grader: {error}"


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


Check = Callable[[Sequence[Mapping[str, Any]]], Mapping[int, str]]
"""Map rows, reduced to the columns that a reward needs, to reasons why some cannot be graded."""


def gradable(prompts: PromptSet, reward_name: str, check: Check, *, drop: bool) -> PromptSet:
    """Return the prompts whose completions the reward can grade.

    Rows that are equal in the columns that the reward needs are checked once.

    Raises DataError naming the first row that cannot be graded; with `drop`, only if none can.
    """
    columns = required_columns(reward_name)
    reasons: dict[int, str] = {}
    equal_rows: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts.prompts):
        missing = [name for name in columns if prompt.data.get(name) is None]
        if missing:
            reasons[index] = (
                f"reward.name = {reward_name!r} needs {missing[0]!r}, which this row lacks (it has "
                f"{', '.join(prompt.data)})"
            )
        elif columns:
            equal_rows.setdefault(repr([prompt.data[name] for name in columns]), []).append(index)
    index_lists = list(equal_rows.values())
    firsts = (prompts.prompts[indices[0]].data for indices in index_lists)
    rows = [{name: data[name] for name in columns} for data in firsts]
    for number, why in check(rows).items():
        reasons |= dict.fromkeys(index_lists[number], why)
    if reasons and (not drop or len(reasons) == len(prompts.prompts)):
        raise DataError(_error_text(prompts, reasons))
    kept = [index for index in range(len(prompts.prompts)) if index not in reasons]
    return replace(prompts.part(kept), num_ungradable=len(reasons))


def _error_text(prompts: PromptSet, reasons: Mapping[int, str]) -> str:
    first, *others = sorted(reasons)
    column = "" if prompts.answer_column is None else f", column {prompts.answer_column!r}"
    more = f"; {len(others)} more of {len(prompts.prompts)} rows are no better" if others else ""
    return (
        f"data.source = {prompts.source!r}, row {prompts.rows[first]}{column}: {reasons[first]}"
        f"{more}; mend the data, name the column of the answers in data.answer_column, choose "
        "another reward.name, or set data.drop_ungradable = true to leave such rows out"
    )
