"""One grader process: reads tasks from its parent, writes one result for each.

`longtail.rl.grading.pool` starts, watches and kills it. It imports no torch unless the reward does.

    parent -> grader   frame: pickle of (kind, [(number, pickle of what the kind asks about), ...])
    grader -> parent   frame: JSON; first {"loading": true} before anything of the reward runs,
                       then {"ready": true} or {"refused": message}, then for each batch
                       {"begun": true} and, as each task ends, [number, reward, null] or
                       [number, null, error]

Tasks are pickled because rewards look at types: through JSON two of reasoning-gym's scorers take
a right answer, whose tuples came back as lists, for a wrong one. Answers are JSON because a
grader may run what a model wrote, so the parent does not unpickle what it says, and takes every
byte that is no answer for the end of this grader.
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

from longtail.errors import LongtailError
from longtail.rl.grading.reward import GradingTask, Reward, checked_number, resolve_reward
from longtail.rl.grading.supervisor import supervise_from_here

LENGTH = struct.Struct("!I")
"""Each frame is preceded by its length in bytes."""

MAX_ERROR_LEN = 2000
"""Characters of an error message that are worth keeping."""

GRADE: Final = "grade"
"""The kind of a task that is (prompt, text, tokens, data): the answer is its reward."""
CHECK: Final = "check"
"""The kind of a task that is a row's data: the answer is 0, or why the row cannot be graded."""


def frame(payload: bytes) -> bytes:
    """Return `payload` with its length in front."""
    return LENGTH.pack(len(payload)) + payload


def read_frame(channel: socket.socket) -> bytes | None:
    """Read one frame, or None where the parent has closed its end."""
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
    """Cut a text to MAX_ERROR_LEN characters, with blanks for those that cannot be printed.

    Example: one_line("no\\n\\ud83d way") == "no   way"
    """
    return "".join(each if each.isprintable() else " " for each in text[:MAX_ERROR_LEN])


def describe(error: BaseException) -> str:
    """Say what went wrong in one line: ours as they are, others with type and place.

    Example: "ZeroDivisionError: division by zero (my_rewards.py:12, in score)"
    """
    if isinstance(error, LongtailError):
        return one_line(str(error))
    said = one_line("".join(traceback.format_exception_only(error)).strip())
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return said
    last = frames[-1]
    return said + one_line(f" ({Path(last.filename).name}:{last.lineno}, in {last.name})")


def _take_channel() -> socket.socket:
    """Take the socket that arrived as stdin; a reward that reads its input finds none."""
    channel = socket.socket(fileno=os.dup(0))
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    return channel


def _answer(reward: Reward, kind: str, payload: bytes) -> float:
    """Do one task; raises whatever the reward raises."""
    asked = pickle.loads(payload)  # noqa: S301 - from the parent process
    if kind == CHECK:
        reward.check(asked)
        return 0.0
    prompt, text, tokens, data = asked
    task = GradingTask(prompt=prompt, text=text, tokens=tokens, data=data)
    return checked_number(reward.grade(task), source="the reward")


def _try(reward: Reward, kind: str, number: int, payload: bytes) -> list[Any]:
    try:
        return [number, _answer(reward, kind, payload), None]
    except BaseException as error:  # noqa: BLE001 - sys.exit() in a reward ends this task alone
        return [number, None, describe(error) or type(error).__name__]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm that is left set is not the next task's


def _say(channel: socket.socket, message: dict[str, Any] | list[Any]) -> None:
    if channel.fileno() < 0:  # the reward forked, and the child came back, too
        os._exit(0)
    channel.sendall(frame(json.dumps(message).encode()))


def serve(reward_name: str, path: list[str]) -> None:
    """Grade until the parent closes its end. The whole life of a grader process.

    `path` is where the reward's modules are looked for; ours are imported by now.
    """
    supervise_from_here(0)
    channel = _take_channel()
    os.register_at_fork(after_in_child=channel.close)  # a reward's processes have nothing to say
    sys.path[:] = path
    with suppress(OSError):  # when memory ends, end the grader, not the trainer
        Path("/proc/self/oom_score_adj").write_text("1000")
    with suppress(ConnectionError):  # the parent is gone: nobody is left to tell
        _say(channel, {"loading": True})
        try:
            reward = resolve_reward(reward_name)
        except BaseException as error:  # noqa: BLE001 - a user's module may raise anything
            named = "" if isinstance(error, LongtailError) else f"reward.name = {reward_name!r}: "
            _say(channel, {"refused": named + describe(error)})
            return
        _say(channel, {"ready": True})
        while (batch := read_frame(channel)) is not None:
            _say(channel, {"begun": True})  # dying before this is no task's fault
            kind, tasks = pickle.loads(batch)  # noqa: S301 - from the parent process
            for number, payload in tasks:
                _say(channel, _try(reward, kind, number, payload))
