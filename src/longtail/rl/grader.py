"""One grader process: reads tasks from its parent, writes one result for each.

`longtail.rl.grading` starts, watches and kills it. It imports no torch unless the reward does.

    parent -> grader   frame: pickle of [(number, pickle of a task's four fields), ...]
    grader -> parent   frame: JSON; first {"ready": true} or {"refused": message}, then for each
                       batch {"begun": true} and, as each task ends, [number, reward, null] or
                       [number, null, error]

Tasks are pickled because rewards look at types: through JSON two of reasoning-gym's scorers take
a right answer, whose tuples came back as lists, for a wrong one. Answers are JSON because a
grader may run what a model wrote, so the parent does not unpickle what it says.
"""

import faulthandler
import json
import os
import pickle
import socket
import struct
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, final

from longtail.errors import LongtailError
from longtail.rl.reward import GradingTask, Reward, checked_number, resolve_reward

LENGTH = struct.Struct("!I")
"""Each frame is preceded by its length in bytes."""

GRACE_S = 10.0
"""How much longer than two time limits an orphaned grader may live."""

MAX_ERROR_LEN = 2000
"""Characters of an error message that are worth keeping."""


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


def describe(error: BaseException) -> str:
    """Say what went wrong in one line: ours as they are, others with type and place.

    Example: "ZeroDivisionError: division by zero (my_rewards.py:12, in score)"
    """
    if isinstance(error, LongtailError):
        return str(error)[:MAX_ERROR_LEN]
    said = "".join(traceback.format_exception_only(error)).strip()[:MAX_ERROR_LEN]
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return said
    last = frames[-1]
    return f"{said} ({Path(last.filename).name}:{last.lineno}, in {last.name})"


@final
class _Watchdog:
    """Ends this process if it grades far beyond the time limit: its parent is gone.

    faulthandler's thread needs no GIL, so a loop in C is ended, too.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._nowhere = os.open(os.devnull, os.O_WRONLY)
        self._armed_at: float | None = None

    def task_begins(self) -> None:
        """Leave this task its whole time limit, and some."""
        now = time.monotonic()
        if self._armed_at is None or now - self._armed_at > self._timeout_s:
            faulthandler.dump_traceback_later(
                2 * self._timeout_s + GRACE_S, exit=True, file=self._nowhere
            )
            self._armed_at = now

    def batch_ends(self) -> None:
        """Wait for the next batch as long as it takes."""
        faulthandler.cancel_dump_traceback_later()
        self._armed_at = None


def _take_channel() -> socket.socket:
    """Take the socket that arrived as stdin; a reward's own prints go to stderr."""
    channel = socket.socket(fileno=os.dup(0))
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return channel


def _grade(reward: Reward, number: int, payload: bytes) -> list[Any]:
    try:
        prompt, text, tokens, data = pickle.loads(payload)
        task = GradingTask(prompt=prompt, text=text, tokens=tokens, data=data)
        return [number, checked_number(reward.grade(task), source="the reward"), None]
    except BaseException as error:  # the supervisor's boundary: sys.exit() in a reward is no exit
        return [number, None, describe(error) or type(error).__name__]


def _say(channel: socket.socket, message: dict[str, Any] | list[Any]) -> None:
    channel.sendall(frame(json.dumps(message).encode()))


def serve(reward_name: str, timeout_s: float) -> None:
    """Grade until the parent closes its end. The whole life of a grader process."""
    channel = _take_channel()
    with suppress(OSError):  # when memory ends, end the grader, not the trainer
        Path("/proc/self/oom_score_adj").write_text("1000")
    with suppress(ConnectionError):  # the parent is gone: nobody is left to tell
        try:
            reward = resolve_reward(reward_name)
        except BaseException as error:  # whatever the user's module does when imported
            named = "" if isinstance(error, LongtailError) else f"reward.name = {reward_name!r}: "
            _say(channel, {"refused": named + describe(error)})
            return
        _say(channel, {"ready": True})
        watchdog = _Watchdog(timeout_s)
        while (batch := read_frame(channel)) is not None:
            _say(channel, {"begun": True})  # dying before this is no task's fault
            for number, payload in pickle.loads(batch):
                watchdog.task_begins()
                _say(channel, _grade(reward, number, payload))
            watchdog.batch_ends()
