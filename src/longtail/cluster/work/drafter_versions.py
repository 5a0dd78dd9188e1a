"""The versions of the drafter: which one the workers serve, and why.

    replicas of idle workers, measured --mean--> offer --> every worker adopts it after the rollout

Weights are versioned, and only the drafter's own tensors travel. A drafter is offered if it
measures better on held-out recent completions than the published one, by more than noise. Every
decision is recorded with its numbers.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from torch import Tensor

from longtail.drafter.formats.checkpoint import LoadedDrafter
from longtail.drafter.training.buffer import DrafterBuffer
from longtail.drafter.training.replica_gain import DrafterGain, Replica
from longtail.drafter.weights import (
    DRAFT_IDS,
    DrafterWeights,
    are_finite,
    check_parameters,
    load_parameters,
    weighted_mean,
    with_prefix,
    without_prefix,
)
from longtail.errors import CheckpointError
from longtail.speculation.drafter import Sums

MIN_GAIN = 0.003
"""Relative gain of the expected accept length from which a drafter is worth a publication."""
_FADE = 0.9
"""Weight of a completion in the sums relative to one of the next step, whose policy is newer."""
_DRAFTER, _SUMS = "drafter/", "sums/"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterState:
    """The published drafter in the middle of a run, with the sums that it learns from, if any."""

    tensors: Mapping[str, Tensor]
    numbers: Mapping[str, Any]

    def drafter(self) -> dict[str, Tensor]:
        """Return the drafter's own parameters."""
        return without_prefix(_DRAFTER, self.tensors)

    def put_into(self, drafter: LoadedDrafter) -> LoadedDrafter:
        """Return a drafter of the run's initial shape with the weights of this state.

        Raises CheckpointError if they do not fit. Earlier measurements are replaced.
        """
        tensors, known = self.drafter(), self.numbers.get("accept_len")
        load_parameters(drafter.layer, tensors)
        return replace(
            drafter,
            draft_ids=tensors.get(DRAFT_IDS, drafter.draft_ids),
            sums=without_prefix(_SUMS, self.tensors),
            training=replace(drafter.training, overlap=(), accept_len=known),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A decision about a drafter, with its numbers."""

    what: str
    """For a replica: trained, kept or discarded. For weights: offered or published."""
    version: int
    """Version of the weights; for a replica, the version from which it was trained."""
    before: float = math.nan
    after: float = math.nan
    num_tokens: int = 0
    """Number of tokens trained on."""
    reason: str = ""


@final
class DrafterVersions:
    """Owns the published drafter, what it learns from, and the decisions about it.

    Versions rise and are not reused. `sums`: those over the completions of all steps, if it learns
    from such; else they are in `buffer`.
    """

    def __init__(
        self, published: DrafterWeights, buffer: DrafterBuffer, sums: Sums | None = None
    ) -> None:
        self.published, self.buffer, self.sums = published, buffer, sums
        """The drafter that the workers serve, and what it learns from."""
        self.gain = DrafterGain()
        """Gain of training, in seconds."""
        self.accept_len: float | None = None
        """Expected accept length of the published drafter when it was adopted; None: unknown."""
        self._last = published.version
        """Newest version given."""
        self._offer = Decision(what="published", version=published.version)
        """The newest offer."""
        self._decisions: list[Decision] = []

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the published drafter."""
        known = {"drafter/version": float(self.published.version)}
        if self.accept_len is not None:
            known["drafter/expected_accept_length"] = self.accept_len
        return known

    # ---- offers

    def offer(self, replicas: Sequence[Replica]) -> DrafterWeights | None:
        """Return the mean of the replicas that measure better; None without any."""
        better = [replica for replica in replicas if self._is_better(replica)]
        if not better:
            return None
        counts, best = [each.num_tokens for each in better], max(better, key=lambda each: each.gain)
        return self._new_offer(  # local SGD: Stich 2018 (arXiv 1805.09767)
            weighted_mean([each.weights for each in better], counts),
            before=best.base_accept_len,
            after=best.accept_len,
            num_tokens=sum(counts),
        )

    def add_sums(self, new: Iterable[Sums]) -> int:
        """Add the sums over the completions of a step; return the number of their tokens."""
        assert self.sums is not None, "the drafter learns from sums"
        known = self.sums.faded(_FADE)
        before = known.num_tokens
        for each in new:
            known.add(each)
        added = round(known.num_tokens - before)
        self.sums = known if added else self.sums
        return added

    def offer_solved(self, tensors: Mapping[str, Tensor], num_tokens: int) -> DrafterWeights:
        """Return new weights that follow from sums; nothing is measured."""
        return self._new_offer(tensors, num_tokens=num_tokens)

    def _new_offer(self, tensors: Mapping[str, Tensor], **measured: Any) -> DrafterWeights:
        self._last += 1
        self._offer = Decision(what="offered", version=self._last, **measured)
        self._decisions.append(self._offer)
        num_known = self.published.num_tokens + self._offer.num_tokens
        return replace(self.published, version=self._last, tensors=tensors, num_tokens=num_known)

    # ---- decisions

    def publish(self, offer: DrafterWeights) -> None:
        """Record that the workers serve the newest offer."""
        self.published, decision = offer, self._offer
        if math.isfinite(decision.after):
            self.accept_len = decision.after
        self._decisions.append(replace(decision, what="published", num_tokens=0, reason=""))

    def record_discarded(self, num_tokens: int, reason: str) -> None:
        """Record that a replica cannot be used."""
        version = self.published.version
        self._decisions.append(
            Decision(what="discarded", version=version, num_tokens=num_tokens, reason=reason)
        )

    def drain_decisions(self) -> list[Decision]:
        """Return the decisions since the last call."""
        found, self._decisions = self._decisions, []
        return found

    def _is_better(self, replica: Replica) -> bool:
        """Return whether a replica measures better than its base; record the decision."""
        gain, reason = replica.gain, ""
        if not are_finite(replica.weights):
            reason = "it is not finite"
        elif not math.isfinite(gain):
            reason = "there was nothing to measure it on"
        elif gain <= MIN_GAIN:
            reason = "no better on held-out recent texts"
        self._decisions.append(
            Decision(
                what="kept" if reason else "trained",
                version=replica.base_version,
                before=replica.base_accept_len,
                after=replica.accept_len,
                num_tokens=replica.num_tokens,
                reason=reason,
            )
        )
        return not reason

    # ---- state

    def state(self, **numbers: object) -> DrafterState:
        """Copy the published drafter and its sums, with `numbers` of the caller."""
        weights = self.published
        return DrafterState(
            tensors=with_prefix(_DRAFTER, weights.tensors)
            | with_prefix(_SUMS, {} if self.sums is None else self.sums.tensors()),
            numbers={
                "version": weights.version,
                "num_tokens": weights.num_tokens,
                "accept_len": self.accept_len,
                **numbers,
            },
        )

    def restore(self, state: DrafterState) -> DrafterWeights:
        """Continue from a saved state and return its drafter.

        Raises CheckpointError, with nothing changed, if it is another drafter's, or damaged.
        """
        tensors, numbers, sums = state.drafter(), state.numbers, self.sums
        try:
            check_parameters(tensors, self.published.tensors, self.published.vocab_size)
            weights = replace(
                self.published,
                version=int(numbers["version"]),
                tensors=tensors,
                num_tokens=int(numbers.get("num_tokens", 0)),
            )
            if sums is not None:
                sums = sums.restored(without_prefix(_SUMS, state.tensors))
        except (LookupError, TypeError, ValueError) as error:
            raise CheckpointError(f"the drafter's state is another one's ({error})") from error
        self.sums = sums
        self.published, self.accept_len = weights, numbers.get("accept_len")
        self._last = max(self._last, weights.version)
        return weights
