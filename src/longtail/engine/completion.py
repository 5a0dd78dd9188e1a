"""From the draws of a step to longer requests and finished completions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from longtail.engine.batch import Scheduled
from longtail.engine.report import Emitted, Failed
from longtail.engine.request import ActiveRequest
from longtail.engine.text import Decode, ends_in_stop, final_text
from longtail.errors import NonFiniteError
from longtail.speculation.verify import Accepted, accept
from longtail.types import Completion, FinishReason


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """Tokens and requests that leave the engine in one step."""

    emitted: list[Emitted] = field(default_factory=list)
    finished: list[Completion] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)


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


def append_tokens(
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
            return complete(active, reason, decode)
    return None


def complete(active: ActiveRequest, reason: FinishReason, decode: Decode) -> Completion:
    """Return the completion of a request that ends now."""
    return Completion(
        request_id=active.request_id,
        tokens=active.generated,
        logprobs=tuple(active.logprobs),
        text=final_text(active.generated, active.request.sampling.stop, decode),
        finish_reason=reason,
        policy_version=active.policy_version,
    )


def _finish_reason(active: ActiveRequest, token: int, decode: Decode) -> FinishReason | None:
    sampling = active.request.sampling
    if token in sampling.stop_token_ids:
        return FinishReason.STOP
    if sampling.stop and ends_in_stop(active.generated, sampling.stop, decode):
        return FinishReason.STOP
    if active.num_generated == sampling.max_tokens:
        return FinishReason.LENGTH
    return None
