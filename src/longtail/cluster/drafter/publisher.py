"""Publication of drafters: of the replicas that were trained, which one the workers serve.

    replicas of spot workers, measured --merge--> offer --> every worker adopts it between two steps

Weights are versioned, and only the drafter's own tensors travel. A drafter is offered if it
measures better on held-out recent texts than all before it, by more than noise, and published once
a worker has adopted it. Every decision is recorded with its numbers.

Replicas are measured on different texts, each beside its base. So their gains are compared: the
ratio of a drafter's accept length to that of the drafter published when the rollout began.

    v2  1.00 --trained--> v3  1.04, offered, published --trained--> 1.04 * 1.02 = 1.06: offered
        `----trained, by another worker---> 1.03: kept, since v3 is better
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

from torch import Tensor

from longtail.drafter.eagle.fresh import renewed_ids
from longtail.drafter.training.buffer import DrafterBuffer
from longtail.drafter.training.replica import Replica, merge
from longtail.drafter.weights import DRAFT_IDS, DrafterWeights, are_finite

MIN_GAIN = 0.003
"""Relative gain of the expected accept length from which a drafter is worth a publication."""
_RENEWED = "draft vocabulary renewed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A decision about a drafter, with its numbers.

    Example: Decision(what="published", version=4, before=2.31, after=2.52, num_tokens=18_000,
                      reason="")
    """

    what: str
    """For a replica: trained, kept or discarded. For weights: offered or published."""
    version: int
    """Version of the weights; for a replica, the version from which it was trained."""
    before: float
    after: float
    num_tokens: int = 0
    """Number of tokens trained on."""
    reason: str = ""


@final
class Publisher:
    """Owns the published drafter and the decisions about it. Versions rise and are not reused."""

    def __init__(self, published: DrafterWeights, buffer: DrafterBuffer) -> None:
        self._published, self._buffer = published, buffer
        self.accept_len: float | None = None
        """Expected accept length of the published drafter when it was adopted; None: unknown."""
        self._first = self._last = published.version
        """Version that workers begin with, and the newest version given."""
        self._has: dict[int, int] = {}
        """Newest version that each worker was offered."""
        self._decisions: list[Decision] = []
        self._recorded: set[Decision] = set()
        """Decisions about replicas in this rollout: each is recorded once."""
        self._gains: dict[int, float] = {}
        """Gain of each version over the drafter published when the rollout began."""
        self._offered: dict[int, tuple[DrafterWeights, Decision]] = {}
        """Weights offered in this rollout by version, each with its decision."""
        self._adopted: set[int] = set()
        self.begin_rollout()

    @property
    def published(self) -> DrafterWeights:
        """Newest drafter that any worker serves."""
        return self._published

    def restore(self, published: DrafterWeights, accept_len: float | None = None) -> None:
        """Continue from a published drafter."""
        self._published, self.accept_len = published, accept_len
        self._last = max(self._last, published.version)
        self.begin_rollout()

    def begin_rollout(self) -> None:
        """Forget earlier measurements: they were made with another policy."""
        self._gains = {self._published.version: 1.0}
        self._recorded.clear()
        self._offered.clear()
        self._adopted.clear()

    # ---- offers

    def offer(self, replicas: Sequence[Replica], *, renews: bool = False) -> DrafterWeights | None:
        """Merge the replicas that measure better than all drafters before; None without any.

        `renews`: a reduced draft vocabulary may be renewed for the texts of the rollout, with
        merged weights or the published ones.
        """
        better = [replica for replica in replicas if self._is_better(replica)]
        if not better:
            return self._renewal() if renews else None
        best = max(better, key=self._gain)
        merged = [each for each in better if each.base_version == best.base_version]
        tensors = merge(merged)
        renewed = self._renewed_ids(tensors) if renews else {}
        return self._new_offer(
            tensors | renewed,
            self._gain(best),
            before=best.base_accept_len,
            after=best.accept_len,
            num_tokens=sum(each.num_tokens for each in merged),
            reason=_RENEWED if renewed else "",
        )

    def offer_solved(self, tensors: Mapping[str, Tensor], num_tokens: int) -> DrafterWeights:
        """Return new weights that follow from sums: the texts decide, so nothing is measured."""
        self.begin_rollout()
        return self._new_offer(tensors, 1.0, num_tokens=num_tokens)

    def measured(self, version: int) -> float:
        """Return the expected accept length of offered weights; NaN if they were not measured."""
        return self._offered[version][1].after

    def withdraw(self) -> None:
        """Forget offers that no worker has adopted, so that their replicas can be offered again."""
        missed = self._offered.keys() - self._adopted
        for version in missed:
            del self._offered[version], self._gains[version]
        if missed:
            self._recorded.clear()

    def missed_by(self, worker: int) -> DrafterWeights | None:
        """Return the published drafter if a worker was never offered it."""
        if self._has.get(worker, self._first) >= self._published.version:
            return None
        return self._published

    def mark_offered(self, worker: int, version: int) -> None:
        """Record that a worker was offered a version."""
        self._has[worker] = version

    def forget(self, worker: int) -> None:
        """Record that a worker was replaced and serves the first drafter."""
        self._has.pop(worker, None)

    # ---- decisions

    def record(self, versions: Sequence[int]) -> None:
        """Record the versions that a worker has adopted; the newest is published."""
        for version in versions:
            if version not in self._offered:
                continue
            weights, decision = self._offered[version]
            self._adopted.add(version)
            if version <= self._published.version:
                continue
            self._published = weights
            if math.isfinite(decision.after):
                self.accept_len = decision.after
            published = replace(decision, what="published", num_tokens=0, reason="")
            self._decisions.append(published)

    def record_discarded(self, num_tokens: int, reason: str) -> None:
        """Record that a replica cannot be used."""
        self._decisions.append(
            Decision(
                what="discarded",
                version=self._published.version,
                before=math.nan,
                after=math.nan,
                num_tokens=num_tokens,
                reason=reason,
            )
        )

    def drain_decisions(self) -> list[Decision]:
        """Return the decisions since the last call."""
        found, self._decisions = self._decisions, []
        return found

    # ---- the draft vocabulary

    def _renewal(self) -> DrafterWeights | None:
        """Return the published weights with a renewed draft vocabulary; None if it is as good."""
        renewed = self._renewed_ids(self._published.tensors)
        if not renewed:
            return None
        tensors, gain = {**self._published.tensors, **renewed}, self._gains[self._published.version]
        return self._new_offer(tensors, gain, reason=_RENEWED)

    def _renewed_ids(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the ids of a renewed draft vocabulary by their name; empty if it is as good."""
        ids = tensors.get(DRAFT_IDS)
        found = None if ids is None else renewed_ids(ids, self._buffer.token_counts())
        return {} if found is None else {DRAFT_IDS: found}

    # ---- replicas

    def _new_offer(
        self,
        tensors: Mapping[str, Tensor],
        gain: float,
        *,
        before: float = math.nan,
        after: float = math.nan,
        num_tokens: int = 0,
        reason: str = "",
    ) -> DrafterWeights:
        self._last += 1
        decision = Decision(
            what="offered",
            version=self._last,
            before=before,
            after=after,
            num_tokens=num_tokens,
            reason=reason,
        )
        num_known = self._published.num_tokens + num_tokens
        weights = DrafterWeights(version=self._last, tensors=tensors, num_tokens=num_known)
        self._offered[weights.version] = weights, decision
        self._gains[weights.version] = gain
        self._decisions.append(decision)
        return weights

    def _is_better(self, replica: Replica) -> bool:
        """Return whether a replica measures better than all before; record the decision once."""
        gain, reason = self._gain(replica), ""
        if not are_finite(replica.weights):
            reason = "it is not finite"
        elif not math.isfinite(gain):
            reason = "there was nothing to measure it on"
        elif gain <= max(self._gains.values()) * (1 + MIN_GAIN):
            reason = "no better on held-out recent texts"
        decision = Decision(
            what="kept" if reason else "trained",
            version=replica.base_version,
            before=replica.base_accept_len,
            after=replica.accept_len,
            num_tokens=replica.num_tokens,
            reason=reason,
        )
        if decision not in self._recorded:
            self._recorded.add(decision)
            self._decisions.append(decision)
        return not reason

    def _gain(self, replica: Replica) -> float:
        """Return the gain over the drafter at the rollout's begin; NaN if it was not measured."""
        base = self._gains.get(replica.base_version, math.nan)
        return base * replica.accept_len / replica.base_accept_len
