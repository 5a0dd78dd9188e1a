"""Offers of drafter weights, and the check that each worker makes before it drafts with them.

The worker that trained a drafter has measured it; a worker that generates does not measure it
again, since with a large vocabulary that takes the time of many of its steps.
"""

from dataclasses import dataclass

from longtail.drafter.eagle.weights import DrafterWeights, are_finite


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Drafter weights for the workers, with their measurement on held-out recent texts.

    Example: Offer(weights=weights, digest=weights.digest, before=2.31, after=2.52)
    """

    weights: DrafterWeights
    digest: str
    """Digest of the weights when they were sent."""
    before: float
    """Expected accept length of the weights that they were trained from; NaN if unmeasured."""
    after: float
    """Expected accept length of these weights, or of the best ones merged; NaN if unmeasured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The decision of one worker about an offer.

    Example: Verdict(version=4, is_adopted=True, before=2.31, after=2.52)
    """

    version: int
    is_adopted: bool
    before: float
    """Copy from the offer, for the decision."""
    after: float
    """Copy from the offer, for the decision."""
    reason: str = ""
    """Reason for a refusal."""


def judge(offer: Offer) -> Verdict:
    """Decide whether to adopt an offer: its weights must be whole and finite."""
    reason = ""
    if offer.weights.digest != offer.digest:
        reason = "they are not what was sent"
    elif not are_finite(offer.weights.tensors):
        reason = "they are not finite"
    return Verdict(
        version=offer.weights.version,
        is_adopted=not reason,
        before=offer.before,
        after=offer.after,
        reason=reason,
    )
