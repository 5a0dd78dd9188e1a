"""Work of a grader process: load the reward once, then grade the tasks that it is given.

`longtail.rl.grading.pool` starts and kills graders. This module imports no torch unless the reward
does, and no error of a reward leaves a grader as an exception, which might not be picklable.
"""

import ctypes
import multiprocessing
import os
import resource
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from longtail.errors import ConfigError, GradingError, LongtailError, describe
from longtail.rl.grading.reward import GradingTask, Reward, reward_factory
from longtail.system import machine

_loaded: list[Reward | ConfigError] = []
"""The reward of this process, or why it cannot be loaded."""


def start(reward_name: str, path: Sequence[str]) -> None:
    """Prepare this process and load the reward; `path` is the module search path for it."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # ends a grader that hangs in C, too
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: end with the parent
        parent = multiprocessing.parent_process()
        if parent is not None and not parent.is_alive():  # it was killed before the signal was set
            os._exit(1)
        limit_memory()
    os.dup2(2, 1)  # stdout belongs to the run
    sys.stdout = sys.stderr  # which escapes what its encoding cannot write
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path[:] = path
    try:
        _loaded.append(reward_factory(reward_name)())
    except BaseException as error:  # noqa: BLE001 - a user's module may raise anything
        prefix = "" if isinstance(error, LongtailError) else f"reward.name = {reward_name!r}: "
        _loaded.append(ConfigError(prefix + describe(error)))


def limit_memory() -> None:
    """Give the reward what is free now; beyond it, an allocation is a MemoryError of the reward."""
    free = machine.memory().available
    if free is not None:
        limit(resource.RLIMIT_DATA, free)
    with suppress(OSError):  # out of memory, the kernel kills the grader, not the trainer
        Path("/proc/self/oom_score_adj").write_text("1000")


def limit(kind: int, most: int) -> None:
    """Limit a resource of this process, within the limit that it has."""
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _reward() -> Reward:
    (reward,) = _loaded
    if isinstance(reward, ConfigError):
        raise reward
    return reward


def grade(tasks: Sequence[GradingTask]) -> list[float | str]:
    """Return the reward of each completion of one prompt, or why there is none."""
    reward = _reward()
    try:
        outcomes = reward.grade_group(tasks)
    except BaseException as error:  # noqa: BLE001 - sys.exit() in a reward ends this task alone
        return [describe(error)] * len(tasks)
    finally:  # an alarm left by this task must not interrupt the next
        signal.setitimer(signal.ITIMER_REAL, 0)
    return [describe(each) if isinstance(each, GradingError) else each for each in outcomes]


def check(rows: Sequence[Mapping[str, Any]]) -> list[str | None]:
    """Return, for each row, why no completion of it can be graded; None if one can.

    Raises `ConfigError` if the reward cannot be loaded.
    """
    reward, reasons = _reward(), list[str | None]()
    for row in rows:
        try:
            reward.check(row)
            reasons.append(None)
        except Exception as error:  # noqa: BLE001 - a reward may raise anything
            reasons.append(describe(error))
    return reasons
