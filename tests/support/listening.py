"""TCP sockets on which a run's processes listen, from Linux's /proc."""

import ipaddress
import os
import re
import socket
import sys
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_LISTENS = "0A"


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
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
    parents = {}
    for entry in _PROC.glob("[0-9]*"):
        try:
            stat = (entry / "stat").read_text()
        except OSError:  # the process has ended
            continue
        parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    found = [pid]
    for member in found:  # the list grows during the loop
        found += [child for child, parent in parents.items() if parent == member]
    return found


def listening(pids: Collection[int]) -> list[Listening]:
    """Return the listening TCP sockets of processes of this user."""
    addresses = dict(_listening_addresses())
    found = set()
    for pid in pids:
        for inode in _sockets(pid):
            if inode in addresses:
                address, port = addresses[inode]
                found.add(Listening(pid=pid, program=_program(pid), address=address, port=port))
    return sorted(found, key=lambda each: (each.pid, each.port, each.address))


def _listening_addresses() -> Iterator[tuple[str, tuple[str, int]]]:
    """Yield the inode, and the address and port, of each listening socket."""
    for name, family_ in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        try:
            rows = (_PROC / "net" / name).read_text().splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            words = row.split()
            address, _, port = words[1].partition(":")
            if words[3] == _LISTENS:
                yield words[9], (_address(address, family_), int(port, 16))


def _address(digits: str, family_: socket.AddressFamily) -> str:
    """Parse an address: 32-bit words in the machine's byte order."""
    words = [int(digits[at : at + 8], 16) for at in range(0, len(digits), 8)]
    return socket.inet_ntop(family_, b"".join(word.to_bytes(4, sys.byteorder) for word in words))


def _sockets(pid: int) -> Iterator[str]:
    """Yield the inodes of a process's sockets."""
    try:
        entries = list((_PROC / str(pid) / "fd").iterdir())
    except OSError:  # the process has ended or is another user's
        return
    for entry in entries:
        with suppress(OSError):  # closed since
            target = os.readlink(entry)
            if target.startswith("socket:["):
                yield target[8:-1]


def _program(pid: int) -> str:
    try:
        words = (_PROC / str(pid) / "cmdline").read_text().split("\0")
    except OSError:
        return "?"
    names = [Path(word.strip()).name for word in words if not word.startswith("-")]
    is_python = names[0].startswith("python") and len(names) > 1 and names[1]
    name = names[1] if is_python else names[0]
    return re.sub(r"^(ray::\w+).*", r"\1", name)  # without the name of the current task
