"""How a request grows by the tokens of a step, when it ends, and with which text."""

import math
from collections.abc import Sequence

from longtail.engine.request import ActiveRequest
from longtail.engine.text import Decode, ends_in_stop, final_text
from longtail.errors import NonFiniteError
from longtail.types import Completion, FinishReason


def extend(
    active: ActiveRequest, tokens: Sequence[int], logprobs: Sequence[float], decode: Decode
) -> Completion | None:
    """Append tokens up to one that ends the request; return its completion if one does.

    Raises NonFiniteError for a logprob that is no number, and whatever decoding raises.
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
    """Return what a request has written, as it ends."""
    text = final_text(active.generated, active.request.sampling.stop, decode)
    return active.complete(reason, text)


def _finish_reason(active: ActiveRequest, token: int, decode: Decode) -> FinishReason | None:
    sampling = active.request.sampling
    if token in sampling.stop_token_ids:
        return FinishReason.STOP
    if sampling.stop and ends_in_stop(active.generated, sampling.stop, decode):
        return FinishReason.STOP
    if active.num_generated == sampling.max_tokens:
        return FinishReason.LENGTH
    return None
