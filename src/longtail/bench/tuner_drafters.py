"""Drafters of known quality, for `longtail bench tuner`: a real one whose drafts are spoiled."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import final
from zlib import crc32

from jaxtyping import Float
from torch import Tensor

from longtail.bench.rollout_cells import Subject
from longtail.bench.tuner_setting import RECIPE, SHARES
from longtail.model.transformer import Taps
from longtail.speculation.drafter import Draftable, Drafter, Noise, Seen
from longtail.speculation.strategy import Strategy
from longtail.speculation.tree import DraftTree, depths
from longtail.speculation.verify import Accepted


@final
class SpoilingDrafter(Drafter):
    """Puts another token at a share of the places; as sure, and as slow, as whom it spoils.

    Which places is a function of the request and the position alone, so every strategy meets the
    same ones. The inner drafter is told how the spoiled drafts fared: its confidences are true
    after a while, and then it is not sure any longer.
    """

    def __init__(self, inner: Drafter, share: float, vocab_size: int) -> None:
        self._inner, self._vocab_size = inner, vocab_size
        self._below = round(share * 2**32)

    @property
    def taps(self) -> Taps:
        """Those of the inner one."""
        return self._inner.taps

    def propose(
        self, requests: Sequence[Draftable], strategy: Strategy, noise: Noise | None
    ) -> list[DraftTree]:
        """Spoil what the inner one proposes."""
        trees = self._inner.propose(requests, strategy, noise)
        return [self._spoiled(*each) for each in zip(requests, trees, strict=True)]

    def _spoiled(self, request: Draftable, tree: DraftTree) -> DraftTree:
        start, own = len(request.tokens) - 1, crc32(request.request_id.encode())
        tokens = tuple(
            (token + 1) % self._vocab_size if self._spoils(own, start + depth) else token
            for token, depth in zip(tree.tokens, depths(tree.parents), strict=True)
        )
        return replace(tree, tokens=tokens)

    def _spoils(self, own: int, position: int) -> bool:
        return crc32(position.to_bytes(4, "little"), own) < self._below

    def observe(
        self, seen: Sequence[Seen], features: Float[Tensor, "tokens features"] | None
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
