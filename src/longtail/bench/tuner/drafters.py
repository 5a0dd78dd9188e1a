"""Drafters of known quality, for `longtail bench tuner`: a real one whose drafts are spoiled."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import final
from zlib import crc32

import numpy as np
from jaxtyping import Float
from torch import Tensor

from longtail.bench.rollout.measure import Subject
from longtail.bench.tuner.options import RECIPE, SHARES
from longtail.speculation.drafter import Draftable, Drafter, Noise, Observed
from longtail.speculation.strategy import Strategy
from longtail.speculation.taps import Taps
from longtail.speculation.tree import DraftTree, depths
from longtail.speculation.verify import Accepted

_PERIOD = 4096
"""Positions after which the places repeat."""


@final
class SpoilingDrafter(Drafter):
    """Puts another token at a share of the places; as sure, and as slow, as whom it spoils.

    Which places is a function of the request and the position alone, so every strategy meets the
    same ones. The inner drafter is told how the spoiled drafts fared: its confidences are true
    after a while, and then it is not sure any longer.
    """

    def __init__(self, inner: Drafter, share: float, vocab_size: int) -> None:
        self._inner, self._vocab_size, self._share = inner, vocab_size, share
        self._places: dict[str, bytes] = {}
        """Of each request, by position: 1 where it is spoiled. Looked up: it costs no time then."""

    @property
    def taps(self) -> Taps:
        """Those of the inner one."""
        return self._inner.taps

    @property
    def lookback(self) -> int:
        """That of the inner one."""
        return self._inner.lookback

    def propose(
        self, requests: Sequence[Draftable], strategy: Strategy, noise: Noise | None
    ) -> list[DraftTree]:
        """Spoil what the inner one proposes."""
        trees = self._inner.propose(requests, strategy, noise)
        return [self._spoiled(*each) for each in zip(requests, trees, strict=True)]

    def _spoiled(self, request: Draftable, tree: DraftTree) -> DraftTree:
        start, places = len(request.tokens) - 1, self._places_of(request.request_id)
        tokens = tuple(
            (token + places[(start + depth) % _PERIOD]) % self._vocab_size
            for token, depth in zip(tree.tokens, depths(tree.parents), strict=True)
        )
        return replace(tree, tokens=tokens)

    def _places_of(self, request_id: str) -> bytes:
        places = self._places.get(request_id)
        if places is None:
            drawn = np.random.default_rng(crc32(request_id.encode())).random(_PERIOD)
            places = self._places[request_id] = (drawn < self._share).astype(np.uint8).tobytes()
        return places

    def observe(
        self, seen: Sequence[Observed], features: Float[Tensor, "tokens features"] | None
    ) -> None:
        """Pass it on."""
        self._inner.observe(seen, features)

    def learn(self, trees: Sequence[DraftTree], accepted: Sequence[Accepted]) -> None:
        """Pass it on: the trees are those that were verified, spoiled as they are."""
        self._inner.learn(trees, accepted)

    def forget(self, request_id: str) -> None:
        """Pass it on."""
        self._inner.forget(request_id)

    def refresh(self) -> None:
        """Pass it on."""
        self._inner.refresh()

    @property
    def forward_s(self) -> float:
        """Seconds of the inner one."""
        return self._inner.forward_s

    @property
    def calibration_error(self) -> float:
        """Of the inner one's confidences, given what became of its drafts."""
        return self._inner.calibration_error


def maker(subject: Subject, name: str) -> Callable[[], Drafter]:
    """Return what makes a new drafter of that quality."""
    good = subject.drafters[RECIPE]
    return partial(_spoiled, good, SHARES[name], subject.model.config.vocab_size)


def _spoiled(good: Callable[[], Drafter], share: float, vocab_size: int) -> Drafter:
    return SpoilingDrafter(good(), share, vocab_size) if share else good()
