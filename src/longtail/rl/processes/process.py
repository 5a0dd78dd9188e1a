"""A process that runs a user's code, and its keeper, which kills all its descendants.

    owner <--pickled questions, lines of JSON--> program, a child of its keeper

The keeper adopts what children of the program leave. When the program ends, or the owner closes its
pipe or ends, the keeper kills all of them. What they print goes to the owner's stderr.
"""

import ctypes
import json
import os
import pickle
import pkgutil
import resource
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from longtail.errors import describe
from longtail.system import machine

MAX_FILE_BYTES = 2**30
"""Largest file that a confined program can write."""
_CLOSING_S = 1.0
"""Seconds in which an idle program may close."""
_SHOWN = "/longtail-environment"
"""Path by which the model knows the scratch folder, whose own is another each time."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A user's code: an object whose methods answer questions; `close` is called at the end."""

    field: str
    """Setting that names it, for errors."""
    make: str
    """Path `module:name` of the function that makes the object."""
    arguments: tuple[Any, ...]
    """Arguments of that function, whose `repr` is their source."""
    is_confined: bool = False
    network: bool = True
    """Whether it reaches the network if it is confined."""


def main(pipe: int, program: Program) -> NoReturn:
    """Start a program, and keep it.

    The exit status is that of the program, or 128 and the signal that ended it.
    """
    scratch = os.path.realpath(tempfile.mkdtemp(prefix="longtail-environment-"))
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    served = os.fork()  # no thread has been started yet
    if served == 0:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()
        os.dup2(2, 1)
        os.set_inheritable(pipe, False)
        _serve(pipe, program, scratch)
    threading.Thread(target=_end_with_owner, args=(pipe, served), daemon=True).start()
    pid = 0
    while pid != served:
        pid, status = os.waitpid(-1, 0)
    _kill_descendants(served)
    shutil.rmtree(scratch, ignore_errors=True)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _end_with_owner(pipe: int, served: int) -> None:
    poll = select.poll()
    poll.register(pipe, 0)  # which reports that the other end is closed, and nothing else
    poll.poll()
    time.sleep(_CLOSING_S)
    with suppress(ProcessLookupError):
        os.kill(served, signal.SIGKILL)


def _kill_descendants(served: int) -> None:
    """Kill all that an ended program leaves; orphans become children of this process."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while os.getpid() != 1:  # of a namespace, which ends with this process
        with suppress(OSError):
            os.killpg(served, signal.SIGKILL)
        with suppress(OSError):
            for child in children.read_text().split():
                os.kill(int(child), signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _serve(pipe: int, program: Program, scratch: str) -> NoReturn:
    """Report that the program is loaded, then answer questions until the pipe is closed.

    A question is the name of a method and its arguments.
    """
    _limit(is_confined=program.is_confined)
    sys.stdout = sys.stderr  # which escapes what its encoding cannot write
    own, problem = os.getpid(), None
    served: Any = None
    try:
        served = pkgutil.resolve_name(program.make)(*program.arguments)
    except BaseException as error:  # noqa: BLE001 - a user's module may raise anything
        problem = describe(error)
    questions, answers = open(pipe, "rb"), open(pipe, "wb", closefd=False)  # noqa: SIM115
    escaped, folder = json.dumps(scratch)[1:-1], os.path.basename(scratch)
    line = json.dumps({"error": problem})
    with suppress(EOFError, ConnectionError, pickle.UnpicklingError):  # the owner has ended
        while True:
            line = line.replace(escaped, _SHOWN).replace(folder, _SHOWN[1:])
            answers.write(f"{line}\n".encode())
            answers.flush()
            if problem is not None:
                break
            method, *arguments = pickle.load(questions)  # noqa: S301 - the owner's
            given = [e.replace(_SHOWN, scratch) if isinstance(e, str) else e for e in arguments]
            try:
                if method == "reset":
                    _enter(scratch)
                line = json.dumps({"value": getattr(served, method)(*given)}, default=asdict)
            except BaseException as error:  # noqa: BLE001 - a user's code may raise anything
                line = json.dumps({"error": describe(error)})
            finally:  # an alarm left by this question must not interrupt the next
                signal.setitimer(signal.ITIMER_REAL, 0)
            if os.getpid() != own:  # it has forked
                os._exit(0)
    if hasattr(served, "close"):
        served.close()
    os._exit(0)


def _enter(scratch: str) -> None:
    """Make an empty folder the working directory, and that of temporary files."""
    shutil.rmtree(scratch, ignore_errors=True)
    os.makedirs(scratch, exist_ok=True)
    os.chdir(scratch)
    os.environ["TMPDIR"] = tempfile.tempdir = scratch


def _limit(*, is_confined: bool) -> None:
    """Give the program the memory that is free now; beyond it, an allocation is a MemoryError."""
    kinds = {resource.RLIMIT_FSIZE: MAX_FILE_BYTES} if is_confined else {}
    if sys.platform == "linux":
        if (free := machine.memory().available) is not None:
            kinds[resource.RLIMIT_DATA] = free
        with suppress(OSError):  # out of memory, the kernel kills this process, not its owner
            Path("/proc/self/oom_score_adj").write_text("1000")
    for kind, most in kinds.items():
        _, hard = resource.getrlimit(kind)
        resource.setrlimit(
            kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard)
        )
