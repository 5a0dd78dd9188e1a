"""A process that supervises one child: it ends the child and all processes that the child started.

It does so when the child ends, and when the owner closes its end of the child's channel or ends in
any way. Grading is unknown here.

    owner ---socket---> supervisor --fork--> child --fork--> ... (also in sessions of their own)
"""

import ctypes
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36
"""Options of prctl, from linux/prctl.h."""

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

SIGNALLED = 128
"""Exit status of a supervisor, as of a shell, minus the signal that killed its child."""


def supervise_from_here(channel: int) -> None:
    """Fork; return in the child, in a session of its own, and supervise it in the parent.

    `channel` is the descriptor of a stream socket; the supervisor only waits until its other end is
    closed. It ends with its child, with the child's exit status, or SIGNALLED plus the signal that
    killed it. Call this before any thread is started.
    """
    on_linux = sys.platform == "linux"
    if on_linux:  # orphans become children of the supervisor, not of init
        _prctl(_SET_CHILD_SUBREAPER, 1)
    supervisor, child = os.getpid(), os.fork()
    if child:
        for number in _STOPPING:
            signal.signal(number, signal.SIG_IGN)  # a signal to the group concerns the child only
        threading.Thread(target=_kill_when_closed, args=(channel, child), daemon=True).start()
        code = _wait_for(child)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)
        _end_children()
        os._exit(SIGNALLED - code if code < 0 else code)
    os.setsid()
    if on_linux:
        _prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != supervisor:  # it was killed before the signal was set
            os._exit(1)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _kill_when_closed(channel: int, child: int) -> None:
    poller = select.poll()
    poller.register(channel, 0)  # a hang-up is reported for any mask
    poller.poll()
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)


def _wait_for(child: int) -> int:
    """Reap orphans until the child ends; return its exit status, or minus the signal's number."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            return os.waitstatus_to_exitcode(status)


def _end_children() -> None:
    """Kill children until none is left; the orphans of a killed child become children."""
    not_ours: set[int] = set()  # processes of another user, by sudo
    while children := set(_children()) - not_ours:
        for pid in children:
            try:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            except (PermissionError, ChildProcessError):
                not_ours.add(pid)


def _children() -> Iterator[int]:
    """Yield the children of this process, zombies included; none without /proc."""
    parent = str(os.getpid())
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has ended meanwhile
            # pid (name) state parent ...; the name may contain blanks and parentheses
            if stat.read_text(errors="replace").rpartition(")")[2].split()[1] == parent:
                yield int(stat.parent.name)
