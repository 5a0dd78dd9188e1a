"""Drafters of known quality for `longtail bench tuner`: a real one with wrong tokens put in."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import final
from zlib import crc32

import numpy as np
from jaxtyping import Float
from torch import Tensor

from longtail.bench.rollout.subjects import Subject
from longtail.bench.tuner.options import RECIPE, SHARES
from longtail.speculation.drafter import Draftable, Drafter, Noise, Observed
from longtail.speculation.strategy import Strategy
from longtail.speculation.taps import Taps
from longtail.speculation.tree import DraftTree, depths
from longtail.speculation.verify import Accepted

_PERIOD = 4096
"""Positions after which the wrong positions repeat."""


@final
class SpoilingDrafter(Drafter):
    """Replaces the inner drafter's tokens at a share of the positions, at no cost in time.

    The positions are a function of the request alone, so every strategy meets the same ones. The
    inner drafter observes the acceptance of the spoiled drafts, so its confidences become true.
    """

    def __init__(self, inner: Drafter, share: float, vocab_size: int) -> None:
        self._inner, self._vocab_size, self._share = inner, vocab_size, share
        self._spoiled_at: dict[str, bytes] = {}
        """1 at the spoiled positions of each request; computed once, then looked up."""

    @property
    def taps(self) -> Taps:
        """Taps of the inner drafter."""
        return self._inner.taps

    @property
    def lookback(self) -> int:
        """Lookback of the inner drafter."""
        return self._inner.lookback

    def propose(
        self, requests: Sequence[Draftable], strategy: Strategy, noise: Noise | None
    ) -> list[DraftTree]:
        """Propose the inner drafter's trees with wrong tokens put in."""
        trees = self._inner.propose(requests, strategy, noise)
        return [self._spoiled(*each) for each in zip(requests, trees, strict=True)]

    def _spoiled(self, request: Draftable, tree: DraftTree) -> DraftTree:
        start, spoiled = len(request.tokens) - 1, self._positions(request.request_id)
        tokens = tuple(
            (token + spoiled[(start + depth) % _PERIOD]) % self._vocab_size
            for token, depth in zip(tree.tokens, depths(tree.parents), strict=True)
        )
        return replace(tree, tokens=tokens)

    def _positions(self, request_id: str) -> bytes:
        if request_id not in self._spoiled_at:
            drawn = np.random.default_rng(crc32(request_id.encode())).random(_PERIOD)
            self._spoiled_at[request_id] = (drawn < self._share).astype(np.uint8).tobytes()
        return self._spoiled_at[request_id]

    def observe(
        self, seen: Sequence[Observed], features: Float[Tensor, "tokens features"] | None
    ) -> None:
        """Forward to the inner drafter."""
        self._inner.observe(seen, features)

    def learn(self, trees: Sequence[DraftTree], accepted: Sequence[Accepted]) -> None:
        """Pass the spoiled trees and their acceptance on to the inner drafter."""
        self._inner.learn(trees, accepted)

    def forget(self, request_id: str) -> None:
        """Forward to the inner drafter."""
        self._inner.forget(request_id)

    def refresh(self) -> None:
        """Forward to the inner drafter."""
        self._inner.refresh()

    @property
    def forward_s(self) -> float:
        """Seconds of the inner drafter's forward passes."""
        return self._inner.forward_s

    @property
    def calibration_error(self) -> float:
        """Calibration error of the inner drafter's confidences."""
        return self._inner.calibration_error


def maker(subject: Subject, name: str) -> Callable[[], Drafter]:
    """Return a function that makes a new drafter of the named quality."""
    good, share = subject.drafters[RECIPE], SHARES[name]
    if not share:
        return good
    return lambda: SpoilingDrafter(good(), share, subject.model.config.vocab_size)
