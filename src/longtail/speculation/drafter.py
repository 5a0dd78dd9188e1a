"""The interface of drafters.

    engine                                       drafter
      propose(requests, strategy, noise)  --->   a tree for each request
      (verifies them in one target pass)
      observe(seen, features)             --->   tokens that the target has computed
      forget(request_id)                  --->   the request has left the engine

Order: before `propose` every token of a request except its last (the root) is observed, in order,
unless its KV came from a sibling or the drafter was added later. A request that is recomputed after
preemption is observed again from position 0. `learn` of a step comes while the next one is
computed, after its `propose`; requests may have left by then. A drafter may be added, changed or
removed between any two steps: drafters never change a token. A removed drafter gets `forget` for
all requests, an added one gets `refresh`.
"""

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longtail.sampling import entry_noise, gumbel_noise
from longtail.speculation.confidence import ConfidenceCurve
from longtail.speculation.strategy import Strategy
from longtail.speculation.tree import Accepted, DraftTree
from longtail.types import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Taps:
    """A selection of the decoder's hidden states; concatenated, they are a token's features."""

    layers: tuple[int, ...] = ()
    """The residual stream as it enters these layers, in rising order."""
    final: bool = False
    """The normed hidden state that the LM head reads."""

    @property
    def any(self) -> bool:
        """Whether any state is selected."""
        return self.final or bool(self.layers)

    def union(self, other: "Taps") -> "Taps":
        """Return the taps that are in either selection."""
        layers = tuple(sorted({*self.layers, *other.layers}))
        return Taps(layers=layers, final=self.final or other.final)

    def pick(
        self, wanted: "Taps", features: Float[Tensor, "tokens features"] | None
    ) -> Float[Tensor, "tokens some"] | None:
        """Return the columns of `features` (of these taps) that belong to the taps `wanted`."""
        if wanted == self or features is None or not wanted.any:
            return features if wanted.any else None
        parts = features.chunk(len(self.layers) + self.final, dim=1)
        picked = [parts[self.layers.index(layer)] for layer in wanted.layers]
        return torch.cat([*picked, *parts[-1:]] if wanted.final else picked, dim=1)


NO_TAPS = Taps()


@dataclass(frozen=True, slots=True, kw_only=True)
class Draftable:
    """A request that a drafter proposes for."""

    request_id: str
    tokens: Sequence[int]
    """Prompt and completion; the last token is the root. The engine's list, read-only."""
    prompt_len: int
    sampling: SamplingParams
    max_depth: int
    """Depth of the deepest useful node; at least 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Consecutive accepted tokens of one request that the target has computed."""

    request_id: str
    tokens: Sequence[int]
    """All tokens so far, as in `Draftable`."""
    start: int
    num_tokens: int
    prompt_len: int
    is_finished: bool = False
    """Whether the sequence has ended; all of it is in `tokens`."""


class Noise:
    """Keyed noise g[key, position, v] of the positions of drafted tokens."""

    def __init__(self, keys: Sequence[int], positions: Sequence[int], vocab_size: int) -> None:
        self.keys, self.positions = keys, positions
        """Noise key of each request, and the position of its nodes of depth 1."""
        self._vocab_size = vocab_size

    def at_depth(
        self, depth: int, entries: Int[Tensor, "entries"] | None = None
    ) -> Float[Tensor, "requests entries"]:
        """Return the noise of each request's nodes of `depth` (from 1); None: of all entries."""
        keys, firsts = torch.tensor([self.keys, self.positions])
        return gumbel_noise(keys, firsts + (depth - 1), self._vocab_size, entries)

    def rows(self, rows: Sequence[int]) -> "Noise":
        """Return the noise of some of the requests."""
        positions = [self.positions[row] for row in rows]
        return Noise([self.keys[row] for row in rows], positions, self._vocab_size)

    def of(self, request: int, depth: int) -> Callable[[int], float]:
        """Return the noise of single entries, for a drafter that proposes few."""
        return entry_noise(self.keys[request], self.positions[request] + depth - 1)


@runtime_checkable
class Sums(Protocol):
    """Statistics of sequences from which a drafter's weights follow.

    Adding is exact: no bit depends on the order or on who added up what.
    """

    @property
    def num_tokens(self) -> float:
        """Number of tokens, as far as they are not faded."""

    def add(self, other: Any) -> None:
        """Add sums of the same kind over other sequences."""

    def faded(self, factor: float) -> "Sums":
        """Return the sums with every sequence weighted by a factor."""

    def weights(
        self, always: Sequence[int], part: int = 0, num_parts: int = 1
    ) -> Mapping[str, Tensor]:
        """Return a drafter's parameters and its draft vocabulary, in which `always` is.

        With several parts, return one of them; some may be empty.
        """

    def tensors(self) -> dict[str, Tensor]:
        """Return the sums by name."""

    def restored(self, tensors: Mapping[str, Tensor]) -> "Sums":
        """Return saved sums; CheckpointError if they are of another shape."""


@runtime_checkable
class Statistics(Protocol):
    """Adds up the finished sequences of a target, whether or not anything is drafted."""

    is_on: bool
    """Whether to read what is observed."""

    @property
    def taps(self) -> Taps:
        """Features that `observe` needs."""

    def observe(self, seen: Sequence[Observed], features: Float[Tensor, "tokens features"]) -> None:
        """Observe computed tokens; the rows of `features` are the tokens of `seen`."""

    def take(self) -> Sums:
        """Return the sums since the last call; sequences in progress are forgotten."""


class Drafter(abc.ABC):
    """Proposes drafts; owns its state of the requests in progress."""

    forward_s = 0.0
    """Seconds of the drafter's own models so far."""

    def __init__(self) -> None:
        self.curve = ConfidenceCurve()

    @property
    @abc.abstractmethod
    def taps(self) -> Taps:
        """Features that `observe` needs."""

    @property
    def is_ready(self) -> bool:
        """Whether it can draft; a fresh drafter waits for its first weights."""
        return True

    @property
    def lookback(self) -> int:
        """Maximum number of tokens before the root that it reads; 0: all.

        Older tokens need not be observed.
        """
        return 0

    @abc.abstractmethod
    def propose(
        self, requests: Sequence[Draftable], strategy: Strategy, noise: Noise | None
    ) -> list[DraftTree]:
        """Return a tree of at most `strategy.num_nodes` nodes, possibly empty, for each request.

        With noise, nodes are the draws of a target that agrees with the drafter (coupled drafting);
        without noise, its likeliest tokens.
        """

    @abc.abstractmethod
    def observe(
        self, seen: Sequence[Observed], features: Float[Tensor, "tokens features"] | None
    ) -> None:
        """Observe computed tokens; the rows of `features` are the tokens of `seen`."""

    def learn(self, trees: Sequence[DraftTree], accepted: Sequence[Accepted]) -> None:
        """Learn from the results of the last or the next-to-last `propose`."""
        for tree, found in zip(trees, accepted, strict=True):
            self.curve.learn(tree, found)

    @abc.abstractmethod
    def forget(self, request_id: str) -> None:
        """Free the state of a request, known or not, that finished or was withdrawn."""

    def statistics(self) -> Statistics | None:
        """Return new statistics of its target's sequences; None if its weights follow from none."""
        return None

    @abc.abstractmethod
    def refresh(self) -> None:
        """Follow the target's weights, which changed in place; no request is in progress."""
