"""Offers of drafter weights, and the check that each worker makes before it drafts with them."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from longtail.drafter.eagle.weights import DrafterWeights, are_finite
from longtail.rl.data.examples import Example


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Drafter weights for the workers, with texts to measure them on.

    Example: Offer(weights=weights, digest=weights.digest, texts=texts)
    """

    weights: DrafterWeights
    digest: str
    """Digest of the weights when they were sent."""
    texts: tuple[Example, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The decision of one worker about an offer.

    Example: Verdict(version=4, is_adopted=True, before=2.31, after=2.52)
    """

    version: int
    is_adopted: bool
    before: float
    """Expected accept length of the weights served before; NaN if it was not measured."""
    after: float
    """Expected accept length of the offered weights; NaN if it was not measured."""
    reason: str = ""
    """Reason for a refusal."""


def judge(
    offer: Offer,
    served: DrafterWeights,
    probe: Callable[[DrafterWeights, Offer], tuple[float, float]],
) -> Verdict:
    """Decide whether a worker that drafts with `served` adopts an offer.

    Weights that were damaged on their way or are not finite are refused without a measurement.
    `probe` returns the expected accept lengths of `served` and of the offered weights; weights that
    measure worse are refused.
    """
    before, after, reason = math.nan, math.nan, ""
    if offer.weights.digest != offer.digest:
        reason = "they are not what was sent"
    elif not are_finite(offer.weights.tensors):
        reason = "they are not finite"
    else:
        before, after = probe(served, offer)
        if after < before:
            reason = f"{after:.3f} on recent texts, {before:.3f} before"
    return Verdict(
        version=offer.weights.version,
        is_adopted=not reason,
        before=before,
        after=after,
        reason=reason,
    )
