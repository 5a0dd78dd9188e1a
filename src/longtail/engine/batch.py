"""A step as a flat list of tokens (plain decode and chunked prefill are the same shape).

request   a  a  a | b | c            three requests: a prefills 3 tokens, b and c decode
token     t  t  t | t | t
position  0  1  2 | 9 | 4
draws           x   x   x            the last pending token of a request yields its next token
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from longtail.engine.request import ActiveRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """The consecutive tokens of one request in a step.

    Example: Segment(request_id="b", num_context=9, num_tokens=1): b decodes its token at position 9
    """

    request_id: str
    num_context: int
    """Tokens of this request already in the cache."""
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduled:
    """A request and how many of its pending tokens this step computes."""

    active: ActiveRequest
    num_tokens: int

    @property
    def draws(self) -> bool:
        """Tell whether the step reaches the request's last token, hence draws the next."""
        return self.num_tokens == self.active.num_pending


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatBatch:
    """The tokens of one step, request by request."""

    tokens: Int[Tensor, "tokens"]
    positions: Int[Tensor, "tokens"]
    segments: tuple[Segment, ...]
    drawing: Int[Tensor, "drawing"] | None
    """Index of the tokens whose successor is drawn; None when it is every token."""


def flatten(scheduled: Sequence[Scheduled], device: torch.device) -> FlatBatch:
    """Lay the pending tokens of the scheduled requests end to end, in the order given."""
    tokens: list[int] = []
    positions: list[int] = []
    segments: list[Segment] = []
    drawing: list[int] = []
    for each in scheduled:
        active, start = each.active, each.active.num_computed
        end = start + each.num_tokens
        tokens += active.tokens[start:end]
        positions += range(start, end)
        segments.append(
            Segment(request_id=active.request_id, num_context=start, num_tokens=each.num_tokens)
        )
        if each.draws:
            drawing.append(len(tokens) - 1)
    every = len(drawing) == len(tokens)
    return FlatBatch(
        tokens=torch.tensor(tokens, device=device),
        positions=torch.tensor(positions, device=device),
        segments=tuple(segments),
        drawing=None if every else torch.tensor(drawing, dtype=torch.int64, device=device),
    )
