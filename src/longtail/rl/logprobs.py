"""Log-probabilities of generated tokens under the distribution they were sampled from.

The rollout engine samples from softmax(logits / temperature), truncated; the policy gradient must
use the same distribution. Only the hidden states of generated tokens reach the LM head. With a
large vocabulary, and under autocast, `model.kernels.scores` scores chunks of rows, so no float32
rows x vocab matrix ever exists.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from longtail.model.kernels.scores import plan_scores, token_scores
from longtail.model.policy import Scorer
from longtail.rl.packing import moved
from longtail.sampling import is_truncated, log_distribution
from longtail.types import PackedSequences, SamplingParams

MAX_LOGITS = 2**24
"""Largest number of logits held at the same time; 64 MiB of float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """Scores with one row per generated token, in the order of the packed tokens."""

    logprobs: Float[Tensor, "generated"]
    """Log-probability of each token; differentiable, unless scored under `torch.no_grad`."""
    entropy: Float[Tensor, "generated"]
    """Entropy of the distribution the token was sampled from, in nats; detached."""
    rows: Int[Tensor, "generated"]
    """Position of the token in the packed sequences."""


def score(
    model: Scorer,
    packed: PackedSequences,
    sampling: SamplingParams,
    *,
    autocast: bool = False,
    recompute: bool = False,
    max_logits: int = MAX_LOGITS,
) -> TokenScores:
    """Score the tokens whose loss_mask is not 0, on the model's device.

    The last hidden state before a token predicts it. `autocast` runs matrix products in bfloat16,
    `recompute` trades time for memory in the layers.
    """
    packed = moved(packed, model.device)
    rows = packed.loss_mask.nonzero()[:, 0]
    targets = packed.tokens.index_select(0, rows)
    with torch.autocast(model.device.type, torch.bfloat16, enabled=autocast):
        hidden = model.hidden(packed, recompute=recompute)
        chosen = hidden.index_select(0, packed.previous[rows])  # [generated, hidden]
        head = model.score_head()
        plan = plan_scores(head, max_logits)
        is_plain = head.is_product and not is_truncated(sampling)
        whole = len(rows) <= plan.chunk and not (is_plain and plan.is_native)
        if whole or not len(rows):
            logprobs, entropy = _score_rows(model, chosen, targets, sampling)
        elif not is_plain:
            chunks = zip(
                *(torch.split(each, plan.chunk) for each in (chosen, targets)), strict=True
            )
            parts = [
                checkpoint(_score_rows, model, *chunk, sampling, use_reentrant=False)
                for chunk in chunks
            ]
            logprobs, entropy = map(torch.cat, zip(*parts, strict=True))
        else:
            logprobs, entropy = token_scores(chosen, head, targets, sampling.temperature, plan)
    return TokenScores(logprobs=logprobs, entropy=entropy.detach(), rows=rows)


def _score_rows(
    model: Scorer,
    hidden: Float[Tensor, "rows hidden"],
    targets: Int[Tensor, "rows"],
    sampling: SamplingParams,
) -> tuple[Float[Tensor, "rows"], Float[Tensor, "rows"]]:
    """Return the log-probability of each target, and the entropy of its distribution.

    NOTE: by rounding, or after an update of the weights, a sampled token may lie outside of the
    truncation; its logprob would be -inf and end the run. Keeping it adds the token's own mass to
    the normaliser and changes nothing if the token is inside.
    """
    logits, chosen = model.logits(hidden), targets[:, None]
    logprobs = log_distribution(logits, replace(sampling, top_k=0, top_p=1.0, min_p=0.0))
    if is_truncated(sampling):
        with torch.no_grad():
            kept = log_distribution(logits, sampling).isfinite().scatter(-1, chosen, True)
        logprobs = logprobs.masked_fill(~kept, float("-inf")).log_softmax(-1)
    with torch.no_grad():
        entropy = torch.special.entr(logprobs.exp()).sum(-1)
    return logprobs.gather(-1, chosen)[:, 0], entropy
