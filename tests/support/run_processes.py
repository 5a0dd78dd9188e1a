"""Processes of a run: those below one, the TCP sockets on which they listen, waiting for them."""

import ipaddress
import re
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil


class Listening(NamedTuple):
    """A listening TCP socket.

    Example: Listening(pid=4242, program="raylet", address="127.0.0.1", port=40321)
    """

    pid: int
    program: str
    """Name of the program: for Python the script, for Ray's workers `ray::...`."""
    address: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """Whether only processes of this machine can connect."""
        found = ipaddress.ip_address(self.address)
        mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
        return (mapped or found).is_loopback


def family(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    return [pid, *(each.pid for each in psutil.Process(pid).children(recursive=True))]


def command(pid: int) -> str:
    """Return the command line of a process; "" if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def listening(pids: Collection[int]) -> list[Listening]:
    """Return the listening TCP sockets of processes of this user."""
    found = set()
    for process in map(psutil.Process, filter(psutil.pid_exists, pids)):
        with suppress(psutil.Error):  # it has ended
            for each in process.net_connections("tcp"):
                if each.status == psutil.CONN_LISTEN:
                    found.add(Listening(process.pid, _program(process.cmdline()), *each.laddr))
    return sorted(found)


def _program(words: list[str]) -> str:
    names = [Path(word.strip()).name for word in words if not word.startswith("-")] or ["?"]
    is_python = names[0].startswith("python") and len(names) > 1 and names[1]
    name = names[1] if is_python else names[0]
    return re.sub(r"^(ray::\w+).*", r"\1", name)  # without the name of the current task


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds, at most a minute."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "the condition did not hold within a minute"
        time.sleep(0.01)
