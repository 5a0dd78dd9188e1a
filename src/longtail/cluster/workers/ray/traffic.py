"""Counts of what passes between the driver's host and others, by kind.

Ray brings an object to a host once, however many of its workers read it; so it is counted once.
Small objects are counted like large ones; Ray's own messages are not.
"""

from collections import defaultdict
from typing import Any, final

from ray.experimental import get_local_object_locations

from longtail.cluster.workers.ray.cluster import Places

_KINDS = {
    "texts": (
        *("generate", "learn", "accumulate", "texts", "add_texts"),
        *("completed", "lengths", "drain_released", "add"),
    ),
    "drafter": ("adopt", "offer", "solve_drafter", "train_drafter", "candidate", "drafter"),
    "policy": ("restore", "restore_saved", "continue_run", "policy_state", "learner_state"),
    "model": ("make",),
}
_KIND = {name: kind for kind, names in _KINDS.items() for name in names}
GRADIENTS, OTHER = "gradients", "other"


@final
class Traffic:
    """Sums bytes until `drain`."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._bytes: dict[str, float] = defaultdict(float)

    def add(self, worker: int, task: str, reference: Any, have: set[str]) -> None:
        """Count an object that a worker is sent or has returned; `have`: hosts that have it."""
        host = self._places.other_host(worker)
        if host is not None and host not in have:
            have.add(host)
            found = get_local_object_locations([reference]).get(reference, {})
            self._bytes[_KIND.get(task, OTHER)] += found.get("object_size") or 0

    def add_gradients(self, sent_bytes: float) -> None:
        """Count what a learner has sent to another host by itself."""
        self._bytes[GRADIENTS] += sent_bytes

    def drain(self) -> dict[str, float]:
        """Return the bytes of every kind as metrics, and begin anew."""
        found, self._bytes = self._bytes, defaultdict(float)
        return {f"network/{kind}_bytes": found[kind] for kind in (*_KINDS, GRADIENTS, OTHER)}
