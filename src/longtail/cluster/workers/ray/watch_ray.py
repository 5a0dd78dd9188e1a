"""Ends this process with a message when its Ray has ended: the raylet or the GCS server.

Ray would end its driver seconds later without a word, or let it wait. A raylet also ends with
its helpers, such as the dashboard's agent; if Ray is faster then, the reaper has the word.
"""

import logging
import os
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ray._private import worker as ray_worker

from longtail.errors import AGAIN

_log = logging.getLogger("longtail")
_NEEDED = ("raylet", "gcs_server")
_POLL_MS = 2000
"""Milliseconds between two looks at the head of a cluster."""
_HEAD_S = 45.0
"""Seconds without an answer of the head after which a run ends; Ray's hosts end after 60."""
CONNECT_S = 2.0
"""Seconds for a connection to an existing cluster, and again for its answer."""
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""Preface of HTTP/2, which a gRPC server answers with its settings: a frame of type 4."""
_SETTINGS = b"\x04"
_CREDENTIALS = struct.Struct("3i")
"""Process, user and group, as SO_PEERCRED returns them."""


def end_with_ray(on_end: Callable[[], None], head: str = "") -> threading.Event:
    """End this process with one sentence when Ray ends before the event is set.

    Ray ends with its processes here, or if its `head` at another address is silent for long. The
    process ends with exit code 1 as if it were killed: the main thread may be in a call of Ray that
    never returns. `on_end` is called between the sentence and the end.
    """
    is_over = threading.Event()
    args = (_processes(), head, is_over, on_end)
    threading.Thread(target=_watch, args=args, daemon=True).start()
    return is_over


def _watch(
    names: dict[int, str], head: str, is_over: threading.Event, on_end: Callable[[], None]
) -> None:
    poll, reason, answered_s = select.poll(), "", time.monotonic()
    for descriptor in names:
        poll.register(descriptor, select.POLLIN)
    while not reason and not is_over.is_set():
        if ended := poll.poll(_POLL_MS):
            reason = f"Ray's {names[ended[0][0]]} has ended, and the workers with it"
            break
        with suppress(ConnectionError):
            check_answers(head)
            answered_s = time.monotonic()
        if time.monotonic() - answered_s > _HEAD_S:
            reason = f"Ray's head at {head} has not answered for {_HEAD_S:.0f} s"
    if not is_over.is_set():
        _log.error("%s; %s", reason, AGAIN)
        on_end()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(1)
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


def check_answers(address: str, timeout_s: float = CONNECT_S) -> None:
    """Raise ConnectionError within seconds if nothing at an address answers as Ray does.

    An address that is no host:port, like "auto", is left to Ray.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not (host and port.isdigit()):
        return
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s) as sock:
            if os.environ.get("RAY_USE_TLS", "0") != "0":
                return
            sock.sendall(_HELLO)
            answer = sock.recv(9)
    except (OSError, OverflowError) as error:
        raise ConnectionError(f"no Ray answers there: {error}") from error
    if answer[3:4] != _SETTINGS:
        raise ConnectionError("another program than Ray answers there")
