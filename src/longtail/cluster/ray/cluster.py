"""A Ray cluster that exists: connecting to it, the places of workers on its hosts, and its head.

Worker 0 is on the driver's host, where it writes the run's directory; the others are spread, one
processor each, with their GPUs. A host that dies gives its places to hosts that have room.
"""

import os
import socket
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import ray
from ray.util.placement_group import placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from longtail.cluster.ray.hosts import Kit
from longtail.errors import ClusterError

CONNECT_S = 2.0
"""Seconds for a connection to an existing cluster, and again for its answer."""
_CHECK_S = 2.0
"""Seconds between two looks at the head, and at the places of workers that are being made."""
_HEAD_S = 45.0
"""Seconds without an answer of the head after which a run ends; Ray's hosts end after 60."""
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""Preface of HTTP/2, which a gRPC server answers with its settings: a frame of type 4."""
_SETTINGS = b"\x04"
_AGAIN = "start again: the run resumes from its newest checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The address of a cluster, what its hosts must have, and the patience with them.

    Example: Cluster(address="10.0.0.1:6379", kit=own_kit(directory, on_cpu=True), timeout_s=180.0)
    """

    address: str
    kit: Kit
    timeout_s: float
    """Seconds to wait for room on the hosts."""


@final
class Places:
    """Holds a place for each worker until `close`. Raises ClusterError if there is no room."""

    def __init__(self, cluster: Cluster, size: int, gpus: float) -> None:
        self._cluster = cluster
        here = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        share = {"CPU": 1.0, "GPU": gpus} if gpus else {"CPU": 1.0}
        shares = [{**share, f"node:{here}": 0.001}, *[share] * (size - 1)]
        self._group: Any = ray.util.placement_group(shares, strategy="SPREAD")
        self._share = share
        if not self._group.wait(timeout_seconds=cluster.timeout_s):
            ray.util.remove_placement_group(self._group)
            there = _text(ray.cluster_resources())  # type: ignore[no-untyped-call]
            raise ClusterError(
                f"cluster.workers = {size}: after {cluster.timeout_s:.0f} s Ray at "
                f"{cluster.address} has no room for them ({_text(share)} each, worker 0 on the "
                f"driver's host; it has {there} in all); start more hosts or lower cluster.workers"
            )
        self._hosts: dict[int, str] = placement_group_table(self._group)["bundles_to_node_id"]
        self.most_on_a_host = max(Counter(self._hosts.values()).values())
        """Number of workers on the host with the most."""
        self._head = str(ray.get_runtime_context().gcs_address)
        self._looked_s = self._answered_s = self._placed_s = time.monotonic()

    def options(self, worker: int) -> dict[str, Any]:
        """Return Ray's options for a worker's process."""
        strategy = PlacementGroupSchedulingStrategy(self._group, worker)
        return {
            "num_cpus": self._share["CPU"],
            "num_gpus": self._share.get("GPU", 0),
            "scheduling_strategy": strategy,
        }

    def other_host(self, worker: int) -> str | None:
        """Return the host of a worker; None if it is the driver's."""
        host = self._hosts.get(worker)
        return None if host == self._hosts.get(0) else host

    def check(self) -> None:
        """Raise ClusterError if the head is silent, or has had no room for a worker, for long."""
        now = time.monotonic()
        if now - self._looked_s < _CHECK_S or not self._answers(now):
            return
        table = placement_group_table(self._group)
        self._hosts = table["bundles_to_node_id"]
        if table["state"] == "CREATED":
            self._placed_s = now
        elif now - self._placed_s > self._cluster.timeout_s:
            raise ClusterError(
                f"a host is gone, and for {self._cluster.timeout_s:.0f} s no other has had room "
                f"for its workers ({_text(self._share)} each); start a host or lower "
                f"cluster.workers, then {_AGAIN}"
            )

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
                    f"and the other hosts, then {_AGAIN}"
                ) from error
            return False
        self._answered_s = now
        return True

    @property
    def has_head(self) -> bool:
        """Whether the head has answered the last look at it."""
        return self._answered_s >= self._looked_s

    def close(self) -> None:
        """Give the places back."""
        ray.util.remove_placement_group(self._group)


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
