"""Process of one environment, and its keeper, which ends it with all its descendants.

    worker <--pickled questions, lines of JSON--> environment --what it prints--> keeper

The keeper is the parent of the environment and adopts what its children leave. When the environment
ends, or the worker closes its pipe or ends, the keeper kills all of them. It prints the first of
what they print to stderr, which is the worker's.
"""

import ctypes
import json
import os
import pickle
import resource
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from longtail.rl.environments.records import Reply

if TYPE_CHECKING:
    from longtail.rl.environments.session import Session

MAX_FILE_BYTES = 2**30
"""Largest file that an environment can write."""
_MAX_PRINTED_BYTES = 2**20
_CLOSING_S = 1.0
"""Seconds in which an idle environment may close."""
_SHOWN = "/longtail-environment"
"""Path by which the model knows the scratch folder, whose own is another each time."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def main(pipe: int, session: tuple[str, Sequence[str], str]) -> NoReturn:
    """Start an environment with arguments of `open_session`, and keep it.

    The exit status is that of the environment, or 128 and the signal that ended it.
    """
    scratch = os.path.realpath(tempfile.mkdtemp(prefix="longtail-environment-"))
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    printed, printing = os.pipe()
    environment = os.fork()  # no thread has been started yet
    if environment == 0:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()
        os.close(printed)
        os.dup2(printing, 1)
        os.dup2(printing, 2)
        os.set_inheritable(pipe, False)
        _serve(pipe, session, scratch)
    os.close(printing)
    threading.Thread(target=_end_with_worker, args=(pipe, environment), daemon=True).start()
    copier = threading.Thread(target=_copy, args=(printed,), daemon=True)
    copier.start()
    pid = 0
    while pid != environment:
        pid, status = os.waitpid(-1, 0)
    _kill_descendants(environment)
    copier.join(1.0)
    shutil.rmtree(scratch, ignore_errors=True)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _end_with_worker(pipe: int, environment: int) -> None:
    poll = select.poll()
    poll.register(pipe, 0)  # which reports that the other end is closed, and nothing else
    poll.poll()
    time.sleep(_CLOSING_S)
    with suppress(ProcessLookupError):
        os.kill(environment, signal.SIGKILL)


def _copy(printed: int) -> None:
    left = _MAX_PRINTED_BYTES
    while data := os.read(printed, 2**16):
        with suppress(OSError):
            os.write(2, data[:left])
        left -= min(left, len(data))


def _kill_descendants(environment: int) -> None:
    """Kill all that an ended environment leaves; orphans become children of this process."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while os.getpid() != 1:  # of a namespace, which ends with this process
        with suppress(OSError):
            os.killpg(environment, signal.SIGKILL)
        with suppress(OSError):
            for child in children.read_text().split():
                os.kill(int(child), signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _serve(pipe: int, session: tuple[str, Sequence[str], str], scratch: str) -> NoReturn:
    """Answer questions, each the name of a method and its arguments, until the pipe is closed."""
    from longtail.errors import describe
    from longtail.rl.environments.session import Session, open_session
    from longtail.rl.grading.grader import limit, limit_memory

    if sys.platform == "linux":
        limit_memory()
    limit(resource.RLIMIT_FSIZE, MAX_FILE_BYTES)
    sys.stdout = sys.stderr  # which escapes what its encoding cannot write
    opened: Session | None = None
    questions, answers = open(pipe, "rb"), open(pipe, "wb", closefd=False)  # noqa: SIM115
    escaped, folder = json.dumps(scratch)[1:-1], os.path.basename(scratch)
    with suppress(EOFError, ConnectionError, pickle.UnpicklingError):  # the worker has ended
        while True:
            method, *arguments = pickle.load(questions)  # noqa: S301 - the worker's
            if method == "step":
                arguments = [each.replace(_SHOWN, scratch) for each in arguments]
            try:
                opened = opened or open_session(*session)
                if method == "reset":
                    _enter(scratch)
                answer = json.dumps(_answer(opened, method, arguments))
            except BaseException as error:  # noqa: BLE001 - an environment may raise anything
                answer = json.dumps({"error": describe(error)})
            finally:  # an alarm left by this question must not interrupt the next
                signal.setitimer(signal.ITIMER_REAL, 0)
            answer = answer.replace(escaped, _SHOWN).replace(folder, _SHOWN[1:])
            answers.write(f"{answer}\n".encode())
            answers.flush()
    if opened is not None:
        opened.close()
    os._exit(0)


def _answer(session: "Session", method: str, arguments: list[Any]) -> dict[str, Any]:
    if method == "tools":
        return {"tools": session.tools}
    reply = getattr(session, method)(*arguments)
    return {"reply": asdict(reply if method != "finish" else Reply(reward=reply, done=True))}


def _enter(scratch: str) -> None:
    """Make an empty folder the working directory, and that of temporary files."""
    shutil.rmtree(scratch, ignore_errors=True)
    os.makedirs(scratch, exist_ok=True)
    os.chdir(scratch)
    os.environ["TMPDIR"] = tempfile.tempdir = scratch
