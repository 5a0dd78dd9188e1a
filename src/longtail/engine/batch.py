"""A step as a flat list of tokens, for decode, verification and chunked prefill alike.

request   c | b  b  b  b | a  a  a       c decodes, b verifies a draft of three, a prefills
token     t | t  n  n  n | t  t  t
position  4 | 9 10 10 11 | 0  1  2       nodes 1 and 2 are children of b's root, 3 is one of 1
draws     x | x  x  x  x |       x       the last pending token of a request, and every node of its
                                         draft, yields the token that follows it
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from longtail.engine.request import ActiveRequest
from longtail.speculation.tree import EMPTY, DraftTree, depths
from longtail.system.device import to_device


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Consecutive tokens of one request in a step, followed by the nodes of its draft.

    Example: Segment(request_id="b", num_context=9, num_tokens=1): b decodes its token at position 9
    """

    request_id: str
    num_context: int
    """Number of the request's tokens in the cache."""
    num_tokens: int
    """Number of text tokens, without the draft's nodes."""
    draft: DraftTree = EMPTY


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduled:
    """A request, the number of its pending tokens that this step computes, and its draft.

    Only a request whose last token is computed has a draft.
    """

    active: ActiveRequest
    num_tokens: int
    draft: DraftTree = EMPTY

    @property
    def draws(self) -> bool:
        """Whether the step computes the request's last token, and so draws the next one."""
        return self.num_tokens == self.active.num_pending


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatBatch:
    """The tokens of one step, request by request."""

    tokens: Int[Tensor, "tokens"]
    positions: Int[Tensor, "tokens"]
    segments: tuple[Segment, ...]
    drawing: Int[Tensor, "drawing"] | None
    """Indices of the tokens whose successor is drawn; None: all tokens."""


def flatten(scheduled: Sequence[Scheduled], device: torch.device) -> FlatBatch:
    """Concatenate the scheduled tokens and drafts in the given order."""
    tokens: list[int] = []
    positions: list[int] = []
    segments: list[Segment] = []
    drawing: list[int] = []
    for each in scheduled:
        active, start, size = each.active, each.active.num_computed, each.draft.size
        end = start + each.num_tokens
        tokens += active.tokens[start:end]
        positions += range(start, end)
        if each.draws:
            drawing += range(len(tokens) - 1, len(tokens) + size)
        if size:
            tokens += each.draft.tokens
            positions += [end - 1 + depth for depth in depths(each.draft.parents)]
        segments.append(
            Segment(
                request_id=active.request_id,
                num_context=start,
                num_tokens=each.num_tokens,
                draft=each.draft,
            )
        )
    every = len(drawing) == len(tokens)
    flat = to_device([tokens, positions], device)
    return FlatBatch(
        tokens=flat[0],
        positions=flat[1],
        segments=tuple(segments),
        drawing=None if every else to_device(drawing, device, torch.int64),
    )
