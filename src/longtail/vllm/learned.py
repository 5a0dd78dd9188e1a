"""The learned drafter of one vLLM worker: copies and block together, by what each has gained.

A request's chain begins with copied tokens where they promise more than the block, and goes on with
the block's. Both are measured against the text at every step, whichever was drafted:

    copies    how often the next token follows, by the number of tokens that matched before it
    block     how often a slot is right, if those before it were
"""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from longtail.vllm.history import LONGEST, Found, Texts
from longtail.vllm.ridge import Block, Draw, Rows

_KEPT = 0.98
"""Weight of earlier steps in the rates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step of vLLM as both model runners have it; all but the last three by flat token."""

    states: Float[Tensor, "tokens hidden"]
    tokens: Int[Tensor, "tokens"]
    positions: Int[Tensor, "tokens"]
    starts: Int[Tensor, "requests"]
    """First token of each request."""
    last: Int[Tensor, "requests"]
    """Last token of each request that stands."""
    given: Int[Tensor, "3 requests"]
    """Number, place and length of the prompt of each request."""

    def rows(self, has_root: Bool[Tensor, "requests"], depth: int) -> Rows:
        """Return the rows that one step can have accepted; none of a prompt."""
        wanted = self.last[:, None] - torch.arange(depth + 1, device=self.last.device)
        counts = (wanted >= self.starts[:, None]) & has_root[:, None]
        wanted = wanted.clamp(min=0)
        positions = self.positions[wanted].long()
        return Rows(
            states=self.states[wanted],
            tokens=self.tokens[wanted].long(),
            positions=positions,
            counts=counts & (positions >= self.given[2][:, None]),
            requests=self.given[0],
        )


Chains = tuple[Int[Tensor, "requests depth"], Bool[Tensor, "requests depth"]]
"""Drafts of a step, and whether there is one; a chain has none after its first gap."""


@final
@dataclass(slots=True)
class _Rates:
    """Shares of right tokens, of which earlier ones count less."""

    hits: Float[Tensor, "kinds"]
    tries: Float[Tensor, "kinds"]

    @staticmethod
    def of(first: list[float], device: torch.device) -> "_Rates":
        return _Rates(torch.tensor(first, device=device), torch.ones(len(first), device=device))

    def values(self) -> Float[Tensor, "kinds"]:
        return self.hits / self.tries

    def learn(self, kinds: Tensor, hits: Tensor, tries: Tensor) -> None:
        """Count tries of each kind."""
        for total, new in ((self.hits, hits & tries), (self.tries, tries)):
            total.mul_(_KEPT).index_add_(0, kinds.flatten(), new.flatten().to(total.dtype))
        self.tries.clamp_(min=1e-3)


@final
class Learned:
    """Copies and block of one worker."""

    def __init__(self, block: Block, texts: Texts, *, copies: bool) -> None:
        self.block, self.texts, self._copies = block, texts, copies
        self._has_changed = False
        device, depth = block.parts.device, block.depth
        expected = [0.1 + 0.08 * min(matched, 6) for matched in range(LONGEST + 1)]
        self._copied = _Rates.of(expected, device)
        self._drafted = _Rates.of([0.4] * depth, device)
        self._last: _Last | None = None

    def status(self) -> dict[str, float]:
        """Return tokens and solves so far, and the accept length that the block promises."""
        return {
            "tokens": self.block.sums.num_tokens,
            "solves": self.block.num_solved,
            "accept_length": 1 + float(self._drafted.values().cumprod(0).sum()),
        }

    def policy_changed(self) -> None:
        """Follow new weights of the target at the next step: they may be loaded one by one."""
        self._has_changed = True

    @torch.inference_mode()
    def step(
        self,
        step: Step,
        roots: Int[Tensor, "requests"],
        has_root: Bool[Tensor, "requests"],
        depth: int,
        draw: Draw,
    ) -> Chains:
        """Learn from a step and draft for the next.

        `roots` are the newest tokens; a request within its prompt has none.
        """
        if self._has_changed:
            self._has_changed = False
            self.block.renew()
        rows, places = step.rows(has_root, self.block.depth), step.given[1]
        self.block.observe(rows)
        at, states = rows.positions[:, :1] + 1, rows.states[:, 0]
        self.texts.write(
            places,
            torch.cat((at, rows.positions), 1),
            torch.cat((roots[:, None], rows.tokens), 1),
            torch.cat((has_root[:, None], rows.counts), 1),
        )
        self._measure()
        found = self.texts.find(places, depth) if self._copies and depth else None
        if depth == 0 or not self.block.is_ready:
            return _alone(found, roots, has_root, depth)
        if found is None:
            drafts = self.block.propose(states, roots, depth, draw)
            return drafts, has_root[:, None].expand_as(drafts)
        goes_first = self._goes_first(found, depth)

        def copied_or_drawn(slot: int, logits: Tensor, ids: Tensor) -> Tensor:
            drawn = draw(slot, logits, ids)
            if slot == 0:
                own.append(drawn)
            return torch.where(goes_first & found.counts[:, slot], found.tokens[:, slot], drawn)

        own = list[Tensor]()
        tokens = self.block.propose(states, roots, depth, copied_or_drawn)
        self._last = _Last(
            places=places, positions=at[:, 0], found=found, tokens=tokens, first=own[0],
            is_own=~goes_first,
        )  # fmt: skip
        return tokens, has_root[:, None].expand_as(tokens)

    def _goes_first(self, found: Found, depth: int) -> Bool[Tensor, "requests"]:
        """Return whether copied tokens promise more than the block's."""
        copied = self._copied.values()
        steps = torch.arange(depth, device=copied.device)
        longer = (found.matched[:, None] + steps).clamp(max=LONGEST)
        promised = (copied[longer] * found.counts).cumprod(1).sum(1)
        return promised > self._drafted.values()[:depth].cumprod(0).sum()

    def _measure(self) -> None:
        """Compare the drafts of the step before with the text."""
        last, self._last = self._last, None
        if last is None:
            return
        # The text is read where it stands, since places in the batch change between steps.
        depth = last.tokens.shape[1]
        text, counts = self.texts.after(last.places, last.positions, depth)
        copied = (last.found.tokens == text) & last.found.counts & counts
        steps = torch.arange(depth, device=text.device)
        so_far = torch.cat((torch.ones_like(copied[:, :1]), copied.cumprod(1).bool()[:, :-1]), 1)
        kinds = (last.found.matched[:, None] + steps).clamp(max=LONGEST)
        self._copied.learn(kinds, copied, last.found.counts & counts & so_far)
        right = (last.tokens == text) & counts & last.is_own[:, None]
        right[:, 0] = (last.first == text[:, 0]) & counts[:, 0]
        so_far = torch.cat((torch.ones_like(right[:, :1]), right.cumprod(1).bool()[:, :-1]), 1)
        tries = counts & so_far & last.is_own[:, None]
        tries[:, 0] = counts[:, 0]
        self._drafted.learn(steps.expand_as(right), right, tries)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Last:
    """Drafts of the step before."""

    places: Int[Tensor, "requests"]
    positions: Int[Tensor, "requests"]
    found: Found
    tokens: Int[Tensor, "requests depth"]
    first: Int[Tensor, "requests"]
    """The block's own first tokens."""
    is_own: Bool[Tensor, "requests"]
    """Whether the chain is the block's."""


def _alone(found: Found | None, roots: Tensor, has_root: Tensor, depth: int) -> Chains:
    """Return copies alone, before there is a block."""
    none = roots[:, None].expand(-1, depth)
    if found is None:
        return none, torch.zeros_like(none, dtype=torch.bool)
    counts = found.counts & (has_root & (found.matched > 1))[:, None]
    return torch.where(counts, found.tokens, none), counts
