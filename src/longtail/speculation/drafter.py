"""The seam between the rollout engine and whatever proposes drafts.

    engine                                       drafter
      propose(requests, strategy, noise)  --->   a tree for each request
      (verifies them in one target pass)
      observe(seen, features)             --->   what the target has now computed for good
      forget(request_id)                  --->   the request is gone

Order: `observe` for the tokens of a step comes before the next `propose`, and every token of a
request but its last (the root) has been observed when a draft is asked, in order, unless its KV
came from a sibling or the drafter was handed in later. A request that is computed anew (after
preemption) is observed anew from position 0. `learn` of a step comes while the next one is
computed, after its `propose`; requests may be gone by then. A drafter may be handed in, changed or
set aside between any two steps: nothing it says or fails to say changes a token. One that is set
aside is told to forget all requests, one that is handed in to refresh.
"""

import abc
from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from longtail.speculation.strategy import Strategy
from longtail.speculation.taps import Taps
from longtail.speculation.tree import DraftTree
from longtail.speculation.verify import Accepted
from longtail.types import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Draftable:
    """A request for which a draft is asked.

    Example: Draftable(request_id="a", tokens=[3, 9, 4, 7], prompt_len=3, sampling=s, max_depth=5)
    """

    request_id: str
    tokens: Sequence[int]
    """Prompt and completion; the last token is the root. The engine's own list: only to be read."""
    prompt_len: int
    sampling: SamplingParams
    max_depth: int
    """Deeper nodes could not be used; at least 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Consecutive tokens of one request that the target computed and that stay.

    Example: Observed(request_id="a", tokens=[3, 9, 4, 7], start=1, num_tokens=2, prompt_len=3): the
    target now has features of the tokens 9 and 4
    """

    request_id: str
    tokens: Sequence[int]
    """The whole text so far, as in `Draftable`."""
    start: int
    num_tokens: int
    prompt_len: int


class Noise(abc.ABC):
    """Keyed noise of the places that drafted tokens would take."""

    @abc.abstractmethod
    def at_depth(self, depth: int) -> Float[Tensor, "requests vocab"]:
        """g[key, position, v] for nodes of `depth` (1: the root's successor), of each request."""

    @abc.abstractmethod
    def up_to(self, depth: int) -> Float[Tensor, "requests depth vocab"]:
        """`at_depth` of every depth from 1 on, dense."""


class Drafter(abc.ABC):
    """Proposes drafts; owns whatever it remembers of the requests in progress."""

    @property
    @abc.abstractmethod
    def taps(self) -> Taps:
        """Features that `observe` needs."""

    @property
    def lookback(self) -> int:
        """Tokens before the root that it reads at most; 0: all it can get.

        What is older need not be observed.
        """
        return 0

    @abc.abstractmethod
    def propose(
        self, requests: Sequence[Draftable], strategy: Strategy, noise: Noise | None
    ) -> list[DraftTree]:
        """Return a tree for each request, at most `strategy.num_nodes` nodes each, maybe none.

        With noise, nodes are what a target that agreed with the drafter would draw (coupled
        drafting); without, what it would find likeliest.
        """

    @abc.abstractmethod
    def observe(
        self, seen: Sequence[Observed], features: Float[Tensor, "tokens features"] | None
    ) -> None:
        """Take note of what the target computed; rows of `features` are the tokens of `seen`."""

    @abc.abstractmethod
    def learn(self, trees: Sequence[DraftTree], accepted: Sequence[Accepted]) -> None:
        """Take note of how drafts fared: those of the last `propose`, or of the one before."""

    @abc.abstractmethod
    def forget(self, request_id: str) -> None:
        """Free what is kept for a request, known or not: it finished or was withdrawn."""

    @abc.abstractmethod
    def refresh(self) -> None:
        """Follow the target: its weights have changed in place; no request is in progress."""

    @property
    @abc.abstractmethod
    def forward_s(self) -> float:
        """Seconds spent in the drafter's own forward passes so far."""

    @property
    @abc.abstractmethod
    def calibration_error(self) -> float:
        """Expected calibration error of node confidences so far."""
