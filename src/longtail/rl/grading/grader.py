"""The grader process: reads tasks from its parent, writes one result for each.

`longtail.rl.grading.pool` starts and kills it. It imports no torch unless the reward does.

    parent -> grader   frame: pickle of (kind, [(number, pickle of the task), ...])
    grader -> parent   frame: JSON; first {"loading": true} before anything of the reward runs,
                       then {"ready": true} or {"refused": message}, then for each batch
                       {"begun": true} and, as each task ends, [number, reward, null],
                       [number, null, error] or, of a group, [number, [reward or error, ...], null]

Tasks are pickled because rewards depend on types: JSON turns tuples into lists, and two scorers of
reasoning-gym then reject right answers. Results are JSON because a grader may run code that a model
wrote, so the parent must not unpickle them; any other byte on the channel ends the grader.
"""

import json
import os
import pickle
import signal
import socket
import struct
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from longtail.errors import GradingError, LongtailError
from longtail.rl.grading.answers import checked_number
from longtail.rl.grading.interface import GradingTask, Reward
from longtail.rl.grading.reward import resolve_reward
from longtail.rl.grading.supervisor import supervise_from_here

LENGTH = struct.Struct("!I")
"""Length in bytes before each frame."""

MAX_ERROR_LEN = 2000
"""Longest error message in characters."""
_MAX_GROUP_ERROR_LEN = 150
"""Longest error message in characters of one completion of a group."""

GRADE: Final = "grade"
"""Kind of a task (prompt, text, tokens, data) whose result is its reward."""
GROUP: Final = "group"
"""Kind of a task that lists such completions, of one prompt; the result is a list, too."""
MAX_GROUP = 512
"""Most completions of a group in one task."""
CHECK: Final = "check"
"""Kind of a task that is a row's data; the result is 0, or why the row cannot be graded."""


def frame(payload: bytes) -> bytes:
    """Return `payload` preceded by its length."""
    return LENGTH.pack(len(payload)) + payload


def read_frame(channel: socket.socket) -> bytes | None:
    """Read one frame; None if the parent has closed its end."""
    head = _read_exactly(channel, LENGTH.size)
    return None if head is None else _read_exactly(channel, LENGTH.unpack(head)[0])


def _read_exactly(channel: socket.socket, num_bytes: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < num_bytes:
        part = channel.recv(num_bytes - len(parts))
        if not part:
            return None
        parts += part
    return bytes(parts)


def one_line(text: str) -> str:
    """Cut a text to MAX_ERROR_LEN characters, and replace unprintable ones by blanks.

    Example: one_line("no\\n\\ud83d way") == "no   way"
    """
    return "".join(each if each.isprintable() else " " for each in text[:MAX_ERROR_LEN])


def describe(error: BaseException) -> str:
    """Return an error in one line: our own message, or type, message and place of any other.

    Example: "ZeroDivisionError: division by zero (my_rewards.py:12, in score)"
    """
    if isinstance(error, LongtailError):
        return one_line(str(error))
    text = one_line("".join(traceback.format_exception_only(error)).strip())
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return text
    last = frames[-1]
    return text + one_line(f" ({Path(last.filename).name}:{last.lineno}, in {last.name})")


def _take_channel() -> socket.socket:
    """Return the socket that is stdin, and make stdin empty for rewards that read it."""
    channel = socket.socket(fileno=os.dup(0))
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    return channel


def _run_task(reward: Reward, kind: str, payload: bytes) -> float | list[float | str]:
    """Return the result of one task; raise any error of the reward."""
    task = pickle.loads(payload)  # noqa: S301 - from the parent process
    if kind == CHECK:
        reward.check(task)
        return 0.0
    if kind == GROUP:
        outcomes = reward.grade_group([_completion(*each) for each in task])
        return [
            str(one)[:_MAX_GROUP_ERROR_LEN] if isinstance(one, GradingError) else one
            for one in outcomes
        ]
    return checked_number(reward.grade(_completion(*task)), source="the reward")


def _completion(prompt: Any, text: str, tokens: tuple[int, ...], data: Any) -> GradingTask:
    return GradingTask(prompt=prompt, text=text, tokens=tokens, data=data)


def _result(reward: Reward, kind: str, number: int, payload: bytes) -> list[Any]:
    try:
        return [number, _run_task(reward, kind, payload), None]
    except BaseException as error:  # noqa: BLE001 - sys.exit() in a reward ends this task alone
        return [number, None, describe(error) or type(error).__name__]
    finally:
        signal.setitimer(
            signal.ITIMER_REAL, 0
        )  # an alarm left by this task must not interrupt the next


def _send(channel: socket.socket, message: dict[str, Any] | list[Any]) -> None:
    if channel.fileno() < 0:  # a child that the reward forked has returned
        os._exit(0)
    channel.sendall(frame(json.dumps(message).encode()))


def serve(reward_name: str, path: list[str]) -> None:
    """Grade until the parent closes its end; the main function of a grader process.

    `path` is the module search path for the reward; longtail's modules are imported by now.
    """
    supervise_from_here(0)
    channel = _take_channel()
    os.register_at_fork(after_in_child=channel.close)  # a reward's own processes must not use it
    sys.path[:] = path
    with suppress(OSError):  # out of memory, the kernel kills the grader, not the trainer
        Path("/proc/self/oom_score_adj").write_text("1000")
    with suppress(ConnectionError):  # the parent has ended
        _send(channel, {"loading": True})
        try:
            reward = resolve_reward(reward_name)
        except BaseException as error:  # noqa: BLE001 - a user's module may raise anything
            prefix = "" if isinstance(error, LongtailError) else f"reward.name = {reward_name!r}: "
            _send(channel, {"refused": prefix + describe(error)})
            return
        _send(channel, {"ready": True})
        while (batch := read_frame(channel)) is not None:
            _send(channel, {"begun": True})  # a death before this fails no task
            kind, tasks = pickle.loads(batch)  # noqa: S301 - from the parent process
            for number, payload in tasks:
                _send(channel, _result(reward, kind, number, payload))
