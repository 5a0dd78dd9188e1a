"""Kills all processes of a private Ray when its owner has ended; a script.

    owner ---pipe---> python -I -S reaper.py FOLDER

When the pipe closes, every process that writes to a file in FOLDER/ray is killed, as all processes
of that Ray do (`own_ray`), and FOLDER is removed. Ray's own helpers would notice the loss of their
owner after a minute. An owner that has written nothing has not said why it ended: Ray ends it
without a word when its raylet does.
"""

import glob
import os
import shutil
import signal
import stat
import sys
import time
from contextlib import suppress

_LAST_WORD = (
    "longtail: the run was ended at once, by a failure of Ray or by a kill; start again: the run "
    "resumes from its newest checkpoint"
)
_ATTEMPTS = 500
_POLL_S = 0.01


def end_processes(folder: str) -> None:
    """Kill until no process of this user writes to a file in `folder`."""
    for _ in range(_ATTEMPTS):
        pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
        writers = [pid for pid in pids if _writes(pid, folder)]
        for pid in writers:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if not writers:
            return
        time.sleep(_POLL_S)


def _writes(pid: int, folder: str) -> bool:
    for file in glob.iglob(f"/proc/{pid}/fd/*"):  # none of a process that has ended
        with suppress(OSError):  # it is closed
            is_written = os.lstat(file).st_mode & stat.S_IWUSR
            if is_written and os.readlink(file).startswith(f"{folder}/"):
                return True
    return False


if __name__ == "__main__":
    if not sys.stdin.buffer.read():
        print(_LAST_WORD, file=sys.stderr, flush=True)
    end_processes(f"{sys.argv[1]}/ray")
    shutil.rmtree(sys.argv[1], ignore_errors=True)
