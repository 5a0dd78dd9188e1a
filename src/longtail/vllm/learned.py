"""The learned drafter of one vLLM worker: copies and block together, by what each has gained.

A request's chain begins with copied tokens where they promise more than the block, and goes on with
the block's. Both are measured against the text at every step, whichever was drafted:

    copies    how often the next token follows, by the number of tokens that matched before it
    block     how often a slot is right, if those before it were
"""

from dataclasses import dataclass
from typing import Any, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from longtail.vllm.history import LONGEST, Found, Texts
from longtail.vllm.ridge import Block, Draw, Rows

_KEPT = 0.98
"""Weight of earlier steps in the rates."""
_READ = 65_536
"""Elements of a parameter that tell whether it is new: in bfloat16 few of an update are."""
_COPIED = LONGEST + 1
"""Number of the rates of copied tokens."""


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
        self.has_changed = False
        """Whether the target has new weights, which the next step follows."""
        device, depth = block.parts.device, block.depth
        copied = [0.1 + 0.08 * min(matched, 6) for matched in range(_COPIED)]
        expected = torch.tensor(copied + [0.4] * depth, device=device)
        self._rates = _Rates(expected, torch.ones_like(expected))
        """Rates of copies by the number of tokens matched, then of the block by slot."""
        self._last: _Last | None = None
        self._seen: Tensor | None = None
        """Sums of the first elements of each of the target's parameters."""

    def status(self) -> dict[str, float]:
        """Return tokens and solves so far, and the accept length that the block promises."""
        return {
            "tokens": self.block.sums.num_tokens,
            "solves": self.block.num_solved,
            "accept_length": 1 + float(self._rates.values()[_COPIED:].cumprod(0).sum()),
        }

    @torch.inference_mode()
    def look(self, model: Any) -> None:
        """Follow weights of the target that differ from those of the last look."""
        weights = list(model.parameters())
        if any(each.is_meta for each in weights):  # a load that the next forward pass ends
            self._seen = None
            return
        sums = [each.reshape(-1)[:_READ].double().sum() for each in weights]
        found = self.block.parts.of_first_rank({"sums": torch.stack(sums)})["sums"]
        self.has_changed |= self._seen is not None and not torch.equal(found, self._seen)
        self._seen = found

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
        if self.has_changed:
            self.has_changed = False
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
        steps, rates = torch.arange(depth, device=at.device), self._rates.values()
        longer = (found.matched[:, None] + steps).clamp(max=LONGEST)
        promised = (rates[longer] * found.counts).cumprod(1).sum(1)
        goes_first = promised > rates[_COPIED:][:depth].cumprod(0).sum()

        def copied_or_drawn(slot: int, logits: Tensor, ids: Tensor) -> Tensor:
            drawn = draw(slot, logits, ids)
            if slot == 0:
                own.append(drawn)
            return torch.where(goes_first & found.counts[:, slot], found.tokens[:, slot], drawn)

        own = list[Tensor]()
        tokens = self.block.propose(states, roots, depth, copied_or_drawn)
        # The block's first token is measured in any case, the others where the chain is its own.
        of_block = torch.cat((own[0][:, None], tokens[:, 1:]), 1)
        counts = (steps == 0) | ~goes_first[:, None]
        self._last = _Last(
            places=places,
            positions=at[:, 0],
            tokens=torch.stack((found.tokens, of_block)),
            counts=torch.stack((found.counts, counts)),
            kinds=torch.stack((longer, (_COPIED + steps).expand_as(longer))),
        )
        return tokens, has_root[:, None].expand_as(tokens)

    def _measure(self) -> None:
        """Compare the drafts of the step before with the text."""
        last, self._last = self._last, None
        if last is None:
            return
        # The text is read where it stands, since places in the batch change between steps.
        text, counts = self.texts.after(last.places, last.positions, last.tokens.shape[2])
        counts = counts & last.counts
        right = (last.tokens == text) & counts
        # A token is tried if those before it are right.
        before = torch.nn.functional.pad(right, (1, -1), value=True).cumprod(2, dtype=torch.int32)
        self._rates.learn(last.kinds, right, counts & before.bool())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Last:
    """Drafts of the step before: copies, and the block's."""

    places: Int[Tensor, "requests"]
    positions: Int[Tensor, "requests"]
    tokens: Int[Tensor, "2 requests depth"]
    counts: Bool[Tensor, "2 requests depth"]
    """Whether a token is measured."""
    kinds: Int[Tensor, "2 requests depth"]
    """Places in the rates."""


def _alone(found: Found | None, roots: Tensor, has_root: Tensor, depth: int) -> Chains:
    """Return copies alone, before there is a block."""
    none = roots[:, None].expand(-1, depth)
    if found is None:
        return none, torch.zeros_like(none, dtype=torch.bool)
    counts = found.counts & (has_root & (found.matched > 1))[:, None]
    return torch.where(counts, found.tokens, none), counts
