"""Which drafter is served: what was trained, what measured better, what the receivers say.

    replicas of spot workers --merge--> offer --> every worker looks for itself --> verdicts

Weights are versioned and only the drafter's own tensors travel. A drafter is offered if it measures
better on held-out recent texts than all before it, by more than noise; it is adopted where it does
no worse on a batch of texts there. Every decision is kept with its numbers.

Replicas are measured on different texts, each beside its base. So a standing is a ratio: what a
drafter gained over the one that was published when the rollout began.

    v2  1.00 --trained--> v3  1.04, offered, published --trained--> 1.04 * 1.02 = 1.06: offered
        `----trained, by another worker---> 1.03: kept, for v3 is better
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from longtail.cluster.records import Offer, Verdict
from longtail.drafter.eagle.weights import DrafterWeights, are_finite
from longtail.drafter.training.buffer import DrafterBuffer
from longtail.drafter.training.spot import Replica, merge

MIN_GAIN = 0.003
"""Relative gain of the expected accept length from which a drafter is worth a publication."""
_PROBED_TOKENS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What was decided about a drafter, and by which numbers.

    Example: Decision(what="published", version=4, before=2.31, after=2.52, num_tokens=18_000,
                      reason="")
    """

    what: str
    """Of a replica: trained, kept, discarded. Of weights: offered, published, refused."""
    version: int
    """Of the weights that it is about; of a replica, of those that it began with."""
    before: float
    after: float
    num_tokens: int = 0
    """Learned from."""
    reason: str = ""


@final
class Publisher:
    """Knows the published drafter, and what is known of it. Versions rise and are never reused."""

    def __init__(self, published: DrafterWeights, buffer: DrafterBuffer) -> None:
        self._published, self._buffer = published, buffer
        self.accept_len: float | None = None
        """Expected, of the published drafter on recent texts when it was adopted; None: unknown."""
        self._first = self._last = published.version
        """Versions that workers begin with, and that was given last."""
        self._has: dict[int, int] = {}
        """By worker, the newest version that it was offered."""
        self._decisions: list[Decision] = []
        self._noted: set[Decision] = set()
        self._standings: dict[int, float] = {}
        self._offered: dict[int, DrafterWeights] = {}
        self._answered: set[int] = set()
        self.begin()

    @property
    def published(self) -> DrafterWeights:
        """The newest drafter that anybody serves."""
        return self._published

    def restore(self, published: DrafterWeights, accept_len: float | None = None) -> Offer:
        """Go on from a drafter that was published; offer it to everybody."""
        self._published, self.accept_len = published, accept_len
        self._last = max(self._last, published.version)
        self.begin()
        return self._as_offer(published)

    def begin(self) -> None:
        """Begin a rollout: the policy is another one, so measurements made before say nothing."""
        self._standings = {self._published.version: 1.0}
        self._noted.clear()
        self._offered.clear()
        self._answered.clear()

    # ---- offers

    def offer(self, replicas: Sequence[Replica]) -> Offer | None:
        """Make one drafter of those that measured better than any before; None if none did."""
        better = [replica for replica in replicas if self._is_better(replica)]
        if not better:
            return None
        best = max(better, key=self._standing)
        mates = [each for each in better if each.base_version == best.base_version]
        self._last += 1
        weights = DrafterWeights(version=self._last, tensors=merge(mates))
        self._offered[weights.version] = weights
        self._standings[weights.version] = self._standing(best)
        self._decide(
            "offered",
            weights.version,
            before=best.base_accept_len,
            after=best.accept_len,
            num_tokens=sum(each.num_tokens for each in mates),
        )
        return self._as_offer(weights)

    def withdraw(self) -> None:
        """Forget offers that nobody has answered: what they were made of may be offered again."""
        unanswered = self._offered.keys() - self._answered
        for version in unanswered:
            del self._offered[version], self._standings[version]
        if unanswered:
            self._noted.clear()

    def missed_by(self, worker: int) -> Offer | None:
        """Return the published drafter if a worker was never offered it; it is now."""
        if self._has.get(worker, self._first) >= self._published.version:
            return None
        self.told(worker, self._published.version)
        return self._as_offer(self._published)

    def told(self, worker: int, version: int) -> None:
        """Note that a worker was offered a version."""
        self._has[worker] = version

    def forget(self, worker: int) -> None:
        """Note that a worker serves what it began with."""
        self._has.pop(worker, None)

    # ---- what came of it

    def note(self, verdicts: Sequence[Verdict]) -> None:
        """Hear what became of offers; published is what anybody serves."""
        for verdict in verdicts:
            weights = self._offered.get(verdict.version)
            if weights is None:
                continue
            self._answered.add(verdict.version)
            is_news = weights.version > self._published.version
            if verdict.is_adopted and is_news:
                self._published = weights
                self.accept_len = verdict.after if math.isfinite(verdict.after) else None
            if is_news or not verdict.is_adopted:
                self._decide(
                    "published" if verdict.is_adopted else "refused",
                    verdict.version,
                    before=verdict.before,
                    after=verdict.after,
                    reason=verdict.reason,
                )

    def discard(self, num_tokens: int, reason: str) -> None:
        """Note that a replica came to nothing."""
        nan = math.nan
        self._decide(
            "discarded",
            self._published.version,
            before=nan,
            after=nan,
            num_tokens=num_tokens,
            reason=reason,
        )

    def drain(self) -> list[Decision]:
        """Hand out the decisions since the last time."""
        found, self._decisions = self._decisions, []
        return found

    # ---- how good a replica is

    def _is_better(self, replica: Replica) -> bool:
        """Judge a replica; the same judgement is noted once."""
        standing, reason = self._standing(replica), ""
        if not are_finite(replica.weights):
            reason = "it is not finite"
        elif not math.isfinite(standing):
            reason = "there was nothing to measure it on"
        elif standing <= max(self._standings.values()) * (1 + MIN_GAIN):
            reason = "no better on held-out recent texts"
        self._decide(
            "kept" if reason else "trained",
            replica.base_version,
            before=replica.base_accept_len,
            after=replica.accept_len,
            num_tokens=replica.num_tokens,
            reason=reason,
        )
        return not reason

    def _standing(self, replica: Replica) -> float:
        """Return what it gained over the drafter of the rollout's beginning; nan if unmeasured."""
        base = self._standings.get(replica.base_version, math.nan)
        return base * replica.accept_len / replica.base_accept_len

    def _as_offer(self, weights: DrafterWeights) -> Offer:
        texts = self._buffer.heldout(_PROBED_TOKENS)
        return Offer(weights=weights, digest=weights.digest, texts=texts)

    def _decide(
        self,
        what: str,
        version: int,
        *,
        before: float,
        after: float,
        num_tokens: int = 0,
        reason: str = "",
    ) -> None:
        decision = Decision(
            what=what,
            version=version,
            before=before,
            after=after,
            num_tokens=num_tokens,
            reason=reason,
        )
        if what not in ("trained", "kept") or decision not in self._noted:
            self._noted.add(decision)
            self._decisions.append(decision)
