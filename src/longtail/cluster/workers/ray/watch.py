"""The end of a run whose Ray has ended: the raylet of this host, or the run's own GCS server.

Ray would end its driver seconds later without a word, or let it wait. A raylet also ends with
its helpers, such as the dashboard's agent; if Ray is faster then, the reaper has the word.
"""

import logging
import os
import select
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ray._private import worker as ray_worker

from longtail.cluster.workers.ray.own_ray import end_at_once
from longtail.errors import AGAIN

_log = logging.getLogger("longtail")
_NEEDED = ("raylet", "gcs_server")
_POLL_MS = 500
_CREDENTIALS = struct.Struct("3i")
"""Process, user and group, as SO_PEERCRED returns them."""


def end_with_ray(on_end: Callable[[], None]) -> threading.Event:
    """End this process with one sentence when Ray's processes end before the event is set.

    It ends as if it were killed: the main thread may be in a call of Ray that never returns.
    `on_end` is called between the sentence and the end.
    """
    is_over = threading.Event()
    threading.Thread(target=_watch, args=(_processes(), is_over, on_end), daemon=True).start()
    return is_over


def _watch(names: dict[int, str], is_over: threading.Event, on_end: Callable[[], None]) -> None:
    ended: list[tuple[int, int]] = []
    poll = select.poll()
    for descriptor in names:
        poll.register(descriptor, select.POLLIN)
    while not ended and not is_over.is_set():
        ended = poll.poll(_POLL_MS)
    if not is_over.is_set():
        name = names[ended[0][0]]
        _log.error("Ray's %s has ended, and the workers with it; %s", name, AGAIN)
        on_end()
        end_at_once()
    for descriptor in names:
        os.close(descriptor)


def _processes() -> dict[int, str]:
    """Return the names of the processes to watch by a descriptor; those that can be found."""
    node: Any = ray_worker._global_node
    found: dict[int, str] = {}
    own = {name: each[0].process.pid for name, each in node.all_processes.items()}
    pids = {name: own[name] for name in _NEEDED if name in own}
    with suppress(OSError, AttributeError):  # a system without such sockets or descriptors
        pids = pids or {"raylet": _server_of(node.raylet_socket_name)}
        for name, pid in pids.items():
            found[os.pidfd_open(pid)] = f"{name} (process {pid})"
    return found


def _server_of(path: str) -> int:
    """Return the process that listens on a socket of this host."""
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
        sent = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(sent)[0])
