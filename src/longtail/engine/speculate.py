"""The engine's side of speculation: whom to draft for, and what a drafter is told afterwards.

    scheduled --> eligible? room? --> drafter.propose --> scheduled, with drafts
                                                              |  (one target pass, `accept`)
    drafter.learn, observe, forget <------- Verified <--------+

A draft takes only what is left over: flat tokens of the step, KV that nobody owns. It preempts
nobody. It owns the drafter and counts nothing that decides a token.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import final

from jaxtyping import Float
from torch import Tensor

from longtail.engine.batch import Scheduled
from longtail.engine.noise import NoiseAhead
from longtail.engine.report import Verified
from longtail.model.transformer import ModelConfig, Taps
from longtail.speculation.drafter import Draftable, Drafter, Seen
from longtail.speculation.strategy import Strategy
from longtail.speculation.tree import EMPTY, MAX_NODES, cut_depth, depths
from longtail.speculation.verify import Accepted, accept


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """How an engine speculates.

    Example: Speculation(drafter=HistoryDrafter(), strategy=Strategy(depth=6), max_running=32)
    """

    drafter: Drafter
    strategy: Strategy
    coupled: bool = True
    """Draft with the noise that the target will draw with; off only to compare."""
    max_running: int = 0
    """Draft only in steps with at most so many requests; 0 is always."""


@final
class Speculator:
    """Speculation at work; `draft` and `review` of one step come in turn."""

    def __init__(self, speculation: Speculation, config: ModelConfig) -> None:
        self._own = speculation
        windows = [window for window in config.windows if window]
        # A window counts places, and a place inside a draft has several slots.
        self._deepest = min(windows) - 1 if windows else MAX_NODES

    @property
    def taps(self) -> Taps:
        """Features that the drafter reads."""
        return self._own.drafter.taps

    def draft(
        self,
        scheduled: Sequence[Scheduled],
        noise: NoiseAhead,
        spare_tokens: int,
        try_grow: Callable[[str, int], bool],
    ) -> list[Scheduled]:
        """Return what was scheduled, with drafts of `spare_tokens` nodes in all at most."""
        own = self._own
        if own.max_running and len(scheduled) > own.max_running:
            return list(scheduled)
        asking = [each for each in scheduled if each.draws and self._max_depth(each) > 0]
        nodes = min(own.strategy.num_nodes, spare_tokens // max(len(asking), 1))
        if not nodes:
            return list(scheduled)
        asking = [
            each
            for each in asking
            if try_grow(each.active.request_id, len(each.active.tokens) + nodes)
        ]
        if not asking:
            return list(scheduled)
        strategy = replace(own.strategy, depth=min(own.strategy.depth, nodes), size=nodes)
        noise.reach([each.active for each in scheduled if each.draws], strategy.depth)
        ahead = noise.ahead([each.active for each in asking], strategy.depth)
        trees = own.drafter.propose(
            [self._draftable(each) for each in asking], strategy, ahead if own.coupled else None
        )
        assert all(tree.size <= nodes for tree in trees), (
            f"a draft of over {nodes} nodes has no room"
        )
        drafts = {
            each.active.request_id: cut_depth(tree, self._max_depth(each))
            for each, tree in zip(asking, trees, strict=True)
        }
        return [
            Scheduled(
                active=each.active,
                num_tokens=each.num_tokens,
                draft=drafts.get(each.active.request_id, EMPTY),
            )
            for each in scheduled
        ]

    def review(
        self,
        scheduled: Sequence[Scheduled],
        accepted: dict[str, Accepted],
        features: Float[Tensor, "tokens features"] | None,
    ) -> tuple[Verified, ...]:
        """Tell the drafter what was computed and how its drafts fared.

        `features` are of all flat tokens of the step; the requests' texts hold the new tokens.
        """
        seen: list[Seen] = []
        rows: list[int] = []
        verified: list[Verified] = []
        first = 0
        for each in scheduled:
            active = each.active
            path: tuple[int, ...] = ()
            if each.draft.size:
                path = accepted[active.request_id].path
                verified.append(_verified(each, path))
            start = active.num_computed - each.num_tokens - len(path)
            count = min(each.num_tokens + len(path), len(active.tokens) - start)
            flat = [*range(first, first + each.num_tokens)]
            flat += [first + each.num_tokens - 1 + node for node in path]
            rows += flat[:count]
            first += each.num_tokens + each.draft.size
            seen.append(
                Seen(
                    request_id=active.request_id,
                    tokens=active.tokens,
                    start=start,
                    num_tokens=count,
                    prompt_len=active.prompt_len,
                )
            )
        drafter = self._own.drafter
        drafted = [each for each in scheduled if each.draft.size]
        drafter.learn(
            [each.draft for each in drafted],
            [accepted[each.active.request_id] for each in drafted],
        )
        if features is not None and len(rows) < first:
            features = features[rows]
        drafter.observe(seen, features)
        return tuple(verified)

    def _max_depth(self, each: Scheduled) -> int:
        """Deepest node of use: the root yields a token, too."""
        if each.num_tokens != 1:
            return 0
        left = each.active.request.sampling.max_tokens - each.active.num_generated
        return min(left - 1, self._deepest)

    def _draftable(self, each: Scheduled) -> Draftable:
        active = each.active
        return Draftable(
            request_id=active.request_id,
            tokens=active.tokens,
            prompt_len=active.prompt_len,
            sampling=active.request.sampling,
            max_depth=self._max_depth(each),
        )


def _verified(each: Scheduled, path: tuple[int, ...]) -> Verified:
    draft = each.draft
    return Verified(
        request_id=each.active.request_id,
        position=each.active.num_computed - len(path) - each.active.prompt_len,
        num_drafted=draft.size,
        depth=max(depths(draft.parents)),
        num_accepted=len(path),
    )


@final
class DraftClock:
    """Seconds of one step that drafting took, and what of them were the drafter's own passes."""

    def __init__(self, speculation: Speculation | None) -> None:
        self._drafter = None if speculation is None else speculation.drafter
        self._before = 0.0 if self._drafter is None else self._drafter.forward_s
        self._entered = self.seconds = 0.0

    def __enter__(self) -> None:
        self._entered = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        if self._drafter is not None:
            self.seconds += time.perf_counter() - self._entered

    def forward_s(self) -> float:
        """Seconds of forward passes since the clock was made."""
        return 0.0 if self._drafter is None else self._drafter.forward_s - self._before


def accept_drafts(
    drawing: Sequence[Scheduled], tokens: Sequence[int], logprobs: Sequence[float]
) -> tuple[dict[str, Accepted], dict[str, list[float]]]:
    """Follow the draws of each request through its draft; logprobs are those of what it reads."""
    accepted: dict[str, Accepted] = {}
    read: dict[str, list[float]] = {}
    first = 0
    for each in drawing:
        end = first + 1 + each.draft.size
        found = accept(each.draft, tokens[first:end])
        accepted[each.active.request_id] = found
        read[each.active.request_id] = [logprobs[first + node] for node in (0, *found.path)]
        first = end
    return accepted, read
