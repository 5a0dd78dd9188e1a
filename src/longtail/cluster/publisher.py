"""Which drafter is served: what was trained, what measured better, what the receivers say.

    replicas of spot workers --merge--> offer --> every worker looks for itself --> verdicts

Weights are versioned and only the drafter's own tensors travel. A drafter is offered if it measures
better on held-out recent texts than the published one did, by more than noise; it is adopted where
it does no worse on a batch of texts there. Every decision is kept with its numbers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from longtail.cluster.worker import Offer, Verdict
from longtail.drafter.buffer import DrafterBuffer
from longtail.drafter.spot import Replica, merge
from longtail.drafter.weights import DrafterWeights

_MIN_GAIN = 0.003
"""Relative gain of the expected accept length from which a drafter is worth a publication."""
_PROBED_TOKENS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What was decided about a drafter, and by which numbers.

    Example: Decision(what="published", version=4, before=2.31, after=2.52, num_tokens=18_000,
                      reason="")
    """

    what: str
    """trained, kept, offered, published, refused."""
    version: int
    """Of the weights that it is about; of a replica, of those that it began with."""
    before: float
    after: float
    num_tokens: int = 0
    """Learned from."""
    reason: str = ""


@final
class Publisher:
    """Knows the published drafter, and what is known of it."""

    def __init__(self, published: DrafterWeights, buffer: DrafterBuffer) -> None:
        self.published, self._buffer = published, buffer
        self._decisions: list[Decision] = []
        self._offered: DrafterWeights | None = None
        self._measured: dict[int, float] = {}
        """Expected accept length of the versions offered under the present policy."""

    def begin(self) -> None:
        """Note that the policy has changed: what was measured before says nothing now."""
        self._measured.clear()

    def offer(self, replicas: Sequence[Replica]) -> Offer | None:
        """Make one drafter of all that gained, and offer it; None if none did."""
        gained = []
        for replica in replicas:
            better = self._gains(replica)
            gained += [replica] if better else []
            self._decisions.append(
                Decision(
                    what="trained" if better else "kept",
                    version=replica.base_version,
                    before=replica.base_accept_len,
                    after=replica.accept_len,
                    num_tokens=replica.num_tokens,
                    reason="" if better else "no better on held-out recent texts",
                )
            )
        if not gained:
            return None
        newest = max(replica.base_version for replica in gained)
        weights = merge([each for each in gained if each.base_version == newest])
        self._offered = DrafterWeights(version=self._next_version(), tensors=weights)
        self._measured[self._offered.version] = max(each.accept_len for each in gained)
        return self._as_offer(self._offered)

    def present(self) -> Offer:
        """Offer what is published already, to somebody who has missed it."""
        return self._as_offer(self.published)

    def note(self, verdicts: Sequence[Verdict]) -> None:
        """Hear what became of offers; published is what anybody serves."""
        for verdict in verdicts:
            if self._offered is None or verdict.version != self._offered.version:
                continue
            if verdict.is_adopted:
                self.published, self._offered = self._offered, None
            self._decisions.append(
                Decision(
                    what="published" if verdict.is_adopted else "refused",
                    version=verdict.version,
                    before=verdict.before,
                    after=verdict.after,
                    reason=verdict.reason,
                )
            )

    def drain(self) -> list[Decision]:
        """Hand out the decisions since the last time."""
        found, self._decisions = self._decisions, []
        return found

    def _as_offer(self, weights: DrafterWeights) -> Offer:
        texts = self._buffer.heldout(_PROBED_TOKENS)
        return Offer(weights=weights, digest=weights.digest, texts=texts)

    def _next_version(self) -> int:
        return max(self.published.version, *self._measured, 0) + 1

    def _gains(self, replica: Replica) -> bool:
        before, after = replica.base_accept_len, replica.accept_len
        before = self._measured.get(self.published.version, before)
        return math.isfinite(after) and not after <= before * (1 + _MIN_GAIN)
