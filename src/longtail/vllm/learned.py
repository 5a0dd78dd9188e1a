"""The drafter that a vLLM worker learns: copied tokens or a block, by what each has gained.

A request's chain begins with copied tokens where they promise more than the block, and goes on with
the block's. Both are measured against the sequence at every step, whichever was drafted:

    copies    how often the next token follows, by the number of tokens that matched before it
    block     how often a slot is right, if those before it were

All of a step but what `Block.learn` does is one function of tensors, which a GPU runs as one graph:
requests, sequences and depths then have a few shapes (not run on a GPU so far).
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from longtail.vllm.history import LONGEST, Found, SequenceTable, sent
from longtail.vllm.ridge import Block, SlotDraw

logger = logging.getLogger("vllm.plugins.longtail")

_KEPT = 0.98
"""Weight of earlier steps in the rates."""
_READ = 65_536
"""Elements of a parameter that tell whether it is new: in bfloat16 few of an update are."""
_COPIED = LONGEST + 1
"""Number of the rates of copied tokens."""
_FEWEST_REQUESTS, _SHORTEST_SEARCHED, _TIMES = 8, 1024, 4
"""The least numbers of requests and tokens that a graph has, and the factor to the next ones."""
_GRAPHS = 256
"""Most graphs: torch's own limit is 8."""

Draw = Callable[..., Tensor]
"""Returns tokens; given logits, whose they are, the `Step`'s last three, positions before."""


class Step(NamedTuple):
    """A step of vLLM as both model runners have it."""

    states: Float[Tensor, "tokens hidden"]
    tokens: Int[Tensor, "tokens"]
    positions: Int[Tensor, "tokens"]
    bounds: Int[Tensor, "ends"]
    """First token of each request, then the end of the last."""
    num_sampled: Int[Tensor, "requests"]
    num_rejected: Int[Tensor, "requests"]
    newest: Int[Tensor, "places"]
    """Token that was drawn last."""
    places: Int[Tensor, "requests"]
    """Place of each request in `newest` and in what follows."""
    temperature: Float[Tensor, "places"] | None
    """None: all requests are greedy."""
    seeds: Int[Tensor, "places"]


@final
class Learned:
    """Copies and block of one worker."""

    def __init__(self, block: Block, sequences: SequenceTable, draw: Draw) -> None:
        self.block, self.sequences, self._draw = block, sequences, draw
        self.has_changed = False
        """Whether the target has new weights, which the next step follows."""
        self._seen: Tensor | None = None
        """Sums of the first elements of each of the target's parameters."""
        device, depth = block.parts.device, block.depth
        copied = [0.1 + 0.08 * min(matched, 6) for matched in range(_COPIED)]
        self._hits = torch.tensor(copied + [0.4] * depth, device=device)
        self._tries = torch.ones_like(self._hits)
        """Right and tried tokens: copies by the number that matched, then the block's by slot."""
        self._tried = torch.full((sequences.num_places, 5, depth), -1, device=device)
        """Drafts of each place's last step: copies, the block's, the place of both in the rates
        (-1: of none), the position before."""
        self._graph: Callable[..., Tensor] | None = None
        if device.type == "cuda":
            self._graph = torch.compile(self._drafted, fullgraph=True, dynamic=False)

    def status(self) -> dict[str, float]:
        """Return tokens and solves so far, and the accept length that the block promises."""
        return {
            "tokens": self.block.sums.num_tokens,
            "solves": self.block.num_solved,
            "accept_length": 1 + float(_promised((self._hits / self._tries)[None, _COPIED:])),
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
        self, step: Step, given: Sequence[Sequence[int]], depth: int
    ) -> Int[Tensor, "requests columns"]:
        """Learn from a step, and return how many drafts each request has, then its drafts.

        `given` is of `SequenceTable.given`. Where there is no draft, the newest token stands in.
        """
        if self.has_changed:
            self.has_changed = False
            self.block.renew()
        count = size = len(given[0])
        width = self.sequences.width
        if self._graph is not None:  # each size makes a graph
            size = _fixed(count, _FEWEST_REQUESTS, self.sequences.max_running)
            width = _fixed(width, _SHORTEST_SEARCHED, self.sequences.max_len)
            depth = depth and self.block.depth
        numbers = [*given, range(count), self.block.reserve(count)]
        padded = [[*each, *[-1] * (size - count)] for each in numbers]
        found = self._run(step, sent(padded, self._tried.device), depth, width)
        self.block.learn()
        return found[:count]

    def _run(self, step: Step, *where: Any) -> Tensor:
        """Draft, by a graph where there is one."""
        if self._graph is None or not self.block.is_ready:
            return self._drafted(step, *where)
        from torch._dynamo.decorators import mark_unbacked  # takes over a second
        from torch._dynamo.exc import TorchDynamoException

        for each in filter(torch.is_tensor, step):  # shapes that differ from step to step
            mark_unbacked(each, 0)
        try:
            with torch._dynamo.config.patch(recompile_limit=_GRAPHS):
                return self._graph(step, *where)
        except TorchDynamoException as error:  # before anything has run
            logger.warning("longtail: drafts are not compiled, and so cost more: %s", error)
            self._graph = None
            return self._drafted(step, *where)

    def _drafted(
        self, step: Step, given: Int[Tensor, "5 requests"], depth: int, width: int
    ) -> Int[Tensor, "requests columns"]:
        """Return what `step` does; `given` has places in `step` and in the buffer, too.

        Columns of -1 are of no request: such a place is that of no sequence.
        """
        numbers, places, prompt_lens, row, first = given.unbind()
        has_root, row = row >= 0, row.clamp(min=0)
        has_root &= step.num_sampled[row] > 0
        index = step.places[row].long()
        roots = step.newest[index].long()
        # The rows that one step can have accepted, the newest first; none of a prompt.
        wanted = step.bounds[row + 1].long() - 1 - step.num_rejected[row].long()
        wanted = wanted[:, None] - torch.arange(self.block.depth + 1, device=row.device)
        counts = (wanted >= step.bounds[row][:, None]) & has_root[:, None]
        wanted = wanted.clamp(min=0)
        positions, tokens = step.positions[wanted].long(), step.tokens[wanted].long()
        counts &= positions >= prompt_lens[:, None]
        states, at = step.states[wanted], positions[:, :1] + 1
        self.block.keep(first, numbers, states, tokens, positions, counts)
        self.sequences.write(
            places,
            torch.cat((at, positions), 1),
            torch.cat((roots[:, None], tokens), 1),
            torch.cat((has_root[:, None], counts), 1),
        )
        self._measure(places, prompt_lens)

        def draw(slot: int, logits: Tensor, ids: Tensor) -> Tensor:
            return self._draw(logits, ids, index, step.temperature, step.seeds, at[:, 0] + slot)

        exist, stand_ins = has_root[:, None], roots[:, None].expand(-1, self.block.depth)
        drafts, tried = stand_ins[:, :0], self._tried[:0]
        if depth:
            found = self.sequences.find(places, depth, width)
            if self.block.is_ready:
                propose = partial(self.block.propose, states[:, 0], roots, depth)
                drafts, tried = self._mixed(found, propose, draw, exist, at)
            else:  # copies alone, before there is a block
                drafts, exist = found.tokens, exist & found.counts & (found.matched > 1)[:, None]
        missing = 0, self.block.depth - drafts.shape[1]
        self._tried[places] = nn.functional.pad(tried, missing, value=-1) if len(tried) else -1
        exist = exist.expand_as(drafts)
        drafts = torch.where(exist, drafts, roots[:, None])
        return torch.cat((exist.sum(1, keepdim=True), drafts, stand_ins[:, drafts.shape[1] :]), 1)

    def _mixed(
        self, found: Found, propose: Callable[[SlotDraw], Tensor], draw: SlotDraw, exist: Tensor,
        at: Tensor,
    ) -> tuple[Int[Tensor, "requests depth"], Int[Tensor, "requests 5 depth"]]:  # fmt: skip
        """Return the block's chains, some of them begun by copies, and what to measure of both."""
        rates = self._hits / self._tries
        steps = torch.arange(found.tokens.shape[1], device=rates.device)
        longer = (found.matched[:, None] + steps).clamp(max=LONGEST)
        promised = _promised(rates[longer] * found.counts)
        goes_first = promised > _promised(rates[None, _COPIED:][:, : len(steps)])
        own: list[Tensor] = []

        def copied_or_drawn(slot: int, logits: Tensor, ids: Tensor) -> Tensor:
            own.append(draw(slot, logits, ids))
            is_copied = goes_first & found.counts[:, slot]
            return torch.where(is_copied, found.tokens[:, slot], own[-1])

        chains = propose(copied_or_drawn)
        # The block's first token is measured in any case, the others where the chain is its own.
        of_block = torch.cat((own[0][:, None], chains[:, 1:]), 1)
        copied = longer.where(exist & found.counts, -1)
        drawn = (_COPIED + steps).where(exist & ((steps == 0) | ~goes_first[:, None]), -1)
        tried = found.tokens, of_block, copied, drawn, at.expand_as(chains)
        return chains, torch.stack(tried, 1)

    def _measure(self, places: Int[Tensor, "requests"], prompt_lens: Tensor) -> None:
        """Compare the drafts of the step before with the sequence, once."""
        tried = self._tried[places]
        tokens, kinds, at = tried[:, :2], tried[:, 2:4], tried[:, 4:]
        sequence, counts = self.sequences.after(places, at[:, 0, 0], self.block.depth)
        # Drafts of an earlier request in this place are before what the present one writes.
        counts = counts[:, None] & (kinds >= 0) & (at >= prompt_lens[:, None, None])
        right = tokens == sequence[:, None]
        rates = torch.arange(len(self._tries), device=places.device)
        hits, tries = self._hits * 0, self._tries * 0
        for slot in range(self.block.depth):  # a token is tried if those before it are right
            of_rate = counts[..., slot, None] & (kinds[..., slot, None] == rates)
            tries = tries + of_rate.sum((0, 1))
            hits = hits + (of_rate & right[..., slot, None]).sum((0, 1))
            counts = counts & right[..., slot, None]
        self._hits.mul_(_KEPT).add_(hits)
        self._tries.mul_(_KEPT).add_(tries).clamp_(min=1e-3)


def _promised(rates: Float[Tensor, "requests depth"]) -> Float[Tensor, "requests"]:
    """Return how many tokens of a chain will be right, by the rate of each after right ones."""
    promised = torch.zeros_like(rates[:, 0])
    for each in reversed(rates.unbind(1)):
        promised = each * (1 + promised)
    return promised


def _fixed(number: int, least: int, most: int) -> int:
    """Return the size of a graph."""
    while least < number:
        least *= _TIMES
    return min(least, most)
