"""Whether a Ray answers at an address, found out within seconds: Ray itself tries for minutes."""

import os
import socket

from longtail.errors import ClusterError

ANSWER_S = 2.0
"""For a connection, and again for an answer."""
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""The beginning of HTTP/2, which gRPC answers with its settings: a frame of kind 4."""
_SETTINGS = b"\x04"


def check_answers(address: str) -> None:
    """Raise ClusterError if nothing at `cluster.address` answers as Ray does.

    What is no host:port, "auto" say, is left to Ray.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not (host and port.isdigit()):
        return
    try:
        reason = _reason(host.strip("[]"), int(port))
    except (OSError, OverflowError) as error:
        reason = str(error)
    if reason:
        raise ClusterError(
            f"cluster.address = {address!r}: no Ray answers there ({reason}); see that it runs and "
            "that this machine reaches it, or leave it out to use a Ray of the run's own"
        )


def _reason(host: str, port: int) -> str:
    with socket.create_connection((host, port), timeout=ANSWER_S) as sock:
        if os.environ.get("RAY_USE_TLS", "0") != "0":
            return ""
        sock.sendall(_HELLO)
        return "" if sock.recv(9)[3:4] == _SETTINGS else "what answers is something else"
