"""A Ray cluster that exists: the places of workers on its hosts, its head, and its traffic.

Worker 0 is on the driver's host, where it writes the run's directory; the others are spread, one
processor each, with their GPUs. Workers of a host that dies start on hosts that have room.

Traffic is what passes between the driver's host and others. Ray brings an object to a host once,
however many of its workers read it; so it is counted once. Small objects are counted like large
ones; Ray's own messages are not.
"""

import os
import socket
import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, final

import ray
from ray.experimental import get_local_object_locations

from longtail.errors import AGAIN, ClusterError

CONNECT_S = 2.0
"""Seconds for a connection to an existing cluster, and again for its answer."""
_CHECK_S = 2.0
"""Seconds between two looks at the head."""
_HEAD_S = 45.0
"""Seconds without an answer of the head after which a run ends; Ray's hosts end after 60."""
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""Preface of HTTP/2, which a gRPC server answers with its settings: a frame of type 4."""
_SETTINGS = b"\x04"
_KINDS = {
    "texts": ("generate", "learn", "accumulate", "texts", "add_texts", "completed"),
    "drafter": ("adopt", "offer", "solve_drafter", "train_drafter", "drafter"),
    "policy": ("restore", "restore_saved", "continue_run", "policy_state", "learner_state"),
    "model": ("make",),
}
"""Tasks and messages by the kind of what they send."""
_KIND = {name: kind for kind, names in _KINDS.items() for name in names}
GRADIENTS, OTHER = "gradients", "other"


@final
class Places:
    """Hosts of the workers, what Ray needs to find room for them, and the bytes of traffic."""

    def __init__(self, address: str, size: int, gpus: float) -> None:
        self._address, self._size = address, size
        self._share = {"CPU": 1.0, "GPU": gpus} if gpus else {"CPU": 1.0}
        self._here = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        self.hosts: dict[int, str] = {}
        """Address of each worker's host; none while it waits for room."""
        self._head = str(ray.get_runtime_context().gcs_address)
        self._looked_s = self._answered_s = time.monotonic()
        self._bytes: dict[str, float] = defaultdict(float)

    def options(self, worker: int) -> dict[str, Any]:
        """Return Ray's options for a worker's process."""
        return {
            "num_cpus": self._share["CPU"],
            "num_gpus": self._share.get("GPU", 0),
            "resources": {} if worker else {f"node:{self._here}": 0.001},
            "scheduling_strategy": "SPREAD",
        }

    def sharing(self, host: str) -> int:
        """Return the number of workers that share a host: its even share, or those it has."""
        nodes = [each for each in ray.nodes() if each["Alive"]]  # type: ignore[no-untyped-call]
        num_hosts = sum("CPU" in each["Resources"] for each in nodes)
        return max(-(-self._size // max(num_hosts, 1)), list(self.hosts.values()).count(host))

    def room(self) -> str:
        """Return what a worker needs, and what Ray has."""
        there = _text(ray.cluster_resources())  # type: ignore[no-untyped-call]
        return (
            f"{_text(self._share)} each, worker 0 on the driver's host; Ray at "
            f"{self._address} has {there} in all"
        )

    def check(self) -> None:
        """Raise ClusterError if the head has been silent for long."""
        if (now := time.monotonic()) - self._looked_s >= _CHECK_S:
            self._answers(now)

    def wait_for_head(self) -> None:
        """Wait until the head answers, as Ray would without end. Raises ClusterError."""
        while not self._answers(time.monotonic()):
            time.sleep(_CHECK_S)

    def _answers(self, now: float) -> bool:
        """Return whether the head answers. Raises ClusterError if it has not for long."""
        self._looked_s = now
        try:
            check_answers(self._head)
        except ConnectionError as error:
            if now - self._answered_s > _HEAD_S:
                raise ClusterError(
                    f"Ray's head at {self._head} has not answered for {_HEAD_S:.0f} s; start it "
                    f"and the other hosts, then {AGAIN}"
                ) from error
            return False
        self._answered_s = now
        return True

    def count(self, worker: int, task: str, reference: Any, have: set[str]) -> None:
        """Count an object that a worker is sent or has returned; `have`: hosts that have it."""
        host = self.hosts.get(worker, self._here)
        if host != self._here and host not in have:
            have.add(host)
            found = get_local_object_locations([reference]).get(reference, {})
            self._bytes[_KIND.get(task, OTHER)] += found.get("object_size") or 0

    def count_gradients(self, sent_bytes: float) -> None:
        """Count what a learner has sent to another host by itself."""
        self._bytes[GRADIENTS] += sent_bytes

    def drain_traffic(self) -> dict[str, float]:
        """Return the bytes of every kind as metrics, and begin anew."""
        found, self._bytes = self._bytes, defaultdict(float)
        return {f"network/{kind}_bytes": found[kind] for kind in (*_KINDS, GRADIENTS, OTHER)}

    @property
    def has_head(self) -> bool:
        """Whether the head has answered the last look at it."""
        return self._answered_s >= self._looked_s


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
        raise ConnectionError("what answers there is no Ray")


def _text(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{resources.get(name, 0):g} {name}s" for name in ("CPU", "GPU"))
