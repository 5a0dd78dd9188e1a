"""A step as a flat list of tokens (decode, verification, chunked prefill), and its results.

request   c | b  b  b  b | a  a  a       c decodes, b verifies a draft of three, a prefills
token     t | t  n  n  n | t  t  t
position  4 | 9 10 10 11 | 0  1  2       nodes 1 and 2 are children of b's root, 3 is one of 1
draws     x | x  x  x  x |       x       the last pending token of a request, and every node of its
                                         draft, yields the token that follows it
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Int
from torch import Tensor

from longtail.engine.request import ActiveRequest
from longtail.engine.text import Decode, ends_in_stop, final_text
from longtail.errors import NonFiniteError
from longtail.generator import Emitted, Failed
from longtail.speculation.tree import EMPTY, Accepted, DraftTree, accept, depths
from longtail.types import Completion, FinishReason


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
    scheduled: Sequence[Scheduled]
    """Consecutive tokens of one request each, followed by the nodes of its draft."""
    drawing: Int[Tensor, "drawing"] | None
    """Indices of the tokens whose successor is drawn; None: all tokens."""


def flatten(scheduled: Sequence[Scheduled]) -> FlatBatch:
    """Concatenate the scheduled tokens and drafts in the given order."""
    tokens: list[int] = []
    positions: list[int] = []
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
    every = len(drawing) == len(tokens)
    return FlatBatch(
        tokens=torch.tensor(tokens),
        positions=torch.tensor(positions),
        scheduled=scheduled,
        drawing=None if every else torch.tensor(drawing, dtype=torch.int64),
    )


def accept_drafts(
    sampled: Sequence[Scheduled], tokens: Sequence[int], logprobs: Sequence[float]
) -> tuple[dict[str, Accepted], dict[str, list[float]]]:
    """Verify each request's draft by its draws; return accepted tokens and their logprobs."""
    accepted: dict[str, Accepted] = {}
    kept: dict[str, list[float]] = {}
    first = 0
    for each in sampled:
        name, end = each.active.request_id, first + 1 + each.draft.size
        found = accepted[name] = accept(each.draft, tokens[first:end])
        kept[name] = [logprobs[first + node] for node in (0, *found.path)]
        first = end
    return accepted, kept


@dataclass(frozen=True, slots=True)
class Results:
    """Tokens, completions and errors of the requests of a step."""

    emitted: list[Emitted] = field(default_factory=list)
    finished: list[Completion] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)

    def append(
        self,
        active: ActiveRequest,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        decode: Decode,
    ) -> bool:
        """Append a request's tokens up to one that ends it; return whether it has ended."""
        name, start, before = active.request_id, len(active.tokens), len(active.logprobs)
        try:
            done = _append_tokens(active, tokens, logprobs, decode)
        except Exception as error:  # noqa: BLE001 - it ends this request alone
            self.failed.append(Failed(request_id=name, error=error))
            return True
        added = zip(active.tokens[start:], active.logprobs[before:], strict=True)
        self.emitted.extend(
            Emitted(request_id=name, token=token, logprob=logprob) for token, logprob in added
        )
        if done is not None:
            self.finished.append(done)
        return done is not None


def _append_tokens(
    active: ActiveRequest, tokens: Sequence[int], logprobs: Sequence[float], decode: Decode
) -> Completion | None:
    """Append tokens up to one that ends the request; return its completion if one does.

    Raises NonFiniteError for a logprob that is not finite, and any error of decoding.
    """
    for token, logprob in zip(tokens, logprobs, strict=True):
        if not math.isfinite(logprob):
            raise NonFiniteError(
                f"logits of request {active.request_id!r} at token {len(active.tokens)} are not "
                f"finite under policy version {active.policy_version}"
            )
        active.tokens.append(token)
        active.logprobs.append(logprob)
        reason = _finish_reason(active, token, decode)
        if reason is not None:
            active.is_finished = True
            return Completion(
                request_id=active.request_id,
                tokens=active.generated,
                logprobs=tuple(active.logprobs),
                text=final_text(active.generated, active.request.sampling.stop, decode),
                finish_reason=reason,
                policy_version=active.policy_version,
            )
    return None


def _finish_reason(active: ActiveRequest, token: int, decode: Decode) -> FinishReason | None:
    sampling = active.request.sampling
    if token in sampling.stop_token_ids:
        return FinishReason.STOP
    if sampling.stop and ends_in_stop(active.generated, sampling.stop, decode):
        return FinishReason.STOP
    if active.num_generated == sampling.max_tokens:
        return FinishReason.LENGTH
    return None
