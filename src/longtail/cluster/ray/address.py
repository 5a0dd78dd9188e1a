"""A check within seconds that a Ray answers at an address; Ray itself would try for minutes."""

import os
import socket

from longtail.errors import ClusterError

ANSWER_S = 2.0
"""Seconds for a connection, and again for an answer."""
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""Preface of HTTP/2, which a gRPC server answers with its settings: a frame of type 4."""
_SETTINGS = b"\x04"


def check_answers(address: str, timeout_s: float = ANSWER_S) -> None:
    """Raise ClusterError if nothing at `cluster.address` answers as Ray does.

    An address that is no host:port, like "auto", is left to Ray.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not (host and port.isdigit()):
        return
    try:
        reason = _reason(host.strip("[]"), int(port), timeout_s)
    except (OSError, OverflowError) as error:
        reason = str(error)
    if reason:
        raise ClusterError(
            f"cluster.address = {address!r}: no Ray answers there ({reason}); see that it runs and "
            "that this machine reaches it, or leave it out to use a Ray of the run's own"
        )


def _reason(host: str, port: int, timeout_s: float) -> str:
    with socket.create_connection((host, port), timeout=timeout_s) as sock:
        if os.environ.get("RAY_USE_TLS", "0") != "0":
            return ""
        sock.sendall(_HELLO)
        return "" if sock.recv(9)[3:4] == _SETTINGS else "what answers is something else"
