"""Log-probability and entropy of tokens under a large vocabulary, without storing the softmax.

    chunk of rows:  logits = hidden W^T  -->  one pass: log-sum, logprob, entropy     forward
                    logits               -->  their gradient, in place                backward

Logits have the dtype of the products. As many rows as `held` allows keep theirs until the backward
pass; those of the other rows are computed again, without the entropy, which has no gradient.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from longtail.model.kernels import native
from longtail.model.kernels.training_products import ROWS, apply, multiply, padded_rows

_HELD_BYTES = 16
"""Bytes of logits that are kept per logit of the caller's limit: four of float32, as PyTorch's
operations need at the same time."""
_COLUMNS = 8192
"""Entries of the vocabulary whose gradients of weights are computed together."""

Logits = Float[Tensor, "rows vocab"]
Numbers = Float[Tensor, "rows"]


class Measured(NamedTuple):
    """Result of a pass over logits."""

    logprobs: Numbers
    entropy: Numbers
    log_sums: Numbers
    """Log of the sum of exp(logit / temperature)."""


class TorchRows:
    """Passes over rows of logits in PyTorch's operations, for any dtype and device."""

    def measure(self, logits: Logits, tokens: Int[Tensor, "rows"], temperature: float) -> Measured:
        """Return the scores of each row's token."""
        scores = _scores(logits, temperature)
        log_sums = scores.logsumexp(-1)
        logprobs = scores - log_sums[:, None]
        entropy = torch.special.entr(logprobs.exp()).sum(-1)
        return Measured(logprobs.gather(-1, tokens[:, None])[:, 0], entropy, log_sums)

    def to_gradient(
        self,
        logits: Logits,
        tokens: Int[Tensor, "rows"],
        temperature: float,
        log_sums: Numbers,
        grads: Numbers,
    ) -> None:
        """Replace logits by their gradient, given that of the logprobs."""
        shares = (grads / temperature).to(log_sums.dtype)[:, None]
        slopes = (_scores(logits, temperature) - log_sums[:, None]).exp_().mul_(-shares)
        logits.copy_(slopes.scatter_add_(-1, tokens[:, None], shares))


@final
class NativeRows(TorchRows):
    """Passes of scores.c, one over each row."""

    def __init__(self, functions: Mapping[str, Callable[..., None]], dtype: torch.dtype) -> None:
        self.dtype = dtype
        """Dtype of the logits."""
        self._measure, self._grade = functions["measure_rows"], functions["grade_rows"]

    def measure(self, logits: Logits, tokens: Int[Tensor, "rows"], temperature: float) -> Measured:
        """Return the scores of each row's token."""
        found = Measured(*torch.empty(3, len(logits)))
        rows = logits, logits.stride(0), *logits.shape, tokens, temperature
        self._measure(*rows, *found, torch.get_num_threads())
        return found

    def to_gradient(
        self,
        logits: Logits,
        tokens: Int[Tensor, "rows"],
        temperature: float,
        log_sums: Numbers,
        grads: Numbers,
    ) -> None:
        """Replace logits by their gradient, given that of the logprobs."""
        grads = grads.to(torch.float32).contiguous()
        rows = logits, logits.stride(0), *logits.shape, tokens, temperature
        self._grade(*rows, log_sums, grads, torch.get_num_threads())


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The weight of the LM head, and how its products are computed."""

    weight: Float[Tensor, "vocab hidden"]
    """Parameter, which gets the gradient."""
    computed: Float[Tensor, "vocab hidden"]
    """The same in the dtype of the products."""
    is_product: bool = True
    """Whether the logits are the product with the weight alone: not scaled, capped or shifted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunking:
    """Division of rows into chunks."""

    passes: TorchRows
    chunk: int
    """Rows whose logits are computed together."""
    held: int
    """Rows whose logits are kept for the backward pass, whole chunks."""

    @property
    def is_native(self) -> bool:
        """Whether logits of few rows are scored better by these passes, too: in bfloat16."""
        return isinstance(self.passes, NativeRows) and self.passes.dtype == torch.bfloat16


def plan_scores(head: Head, max_logits: int) -> Chunking:
    """Return a plan whose memory is at most that of `max_logits` logits in PyTorch's operations."""
    vocab, logit = len(head.weight), head.computed
    functions = native.functions(logit.dtype) if logit.device.type == "cpu" else None
    if functions is None:
        chunk = max(1, max_logits // vocab)
        return Chunking(passes=TorchRows(), chunk=chunk, held=chunk)
    held = _HELD_BYTES * max_logits // (logit.element_size() * vocab)
    chunk = max(1, max_logits // vocab // ROWS) * ROWS
    passes = NativeRows(functions, logit.dtype)
    return Chunking(passes=passes, chunk=chunk, held=max(1, held // chunk) * chunk)


def token_scores(
    hidden: Float[Tensor, "rows hidden"],
    head: Head,
    tokens: Int[Tensor, "rows"],
    temperature: float,
    plan: Chunking,
) -> tuple[Numbers, Numbers]:
    """Return each token's log-probability, and the entropy of its distribution, detached."""
    hidden = hidden.to(head.computed.dtype)
    keeps = torch.is_grad_enabled()
    logprobs, entropy = apply(
        _TokenScores, hidden, head.weight, head, tokens, temperature, plan, keeps
    )
    return logprobs, entropy


class _TokenScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        head: Head,
        tokens: Tensor,
        temperature: float,
        plan: Chunking,
        keeps: bool,
    ) -> tuple[Tensor, Tensor]:
        padded, size = padded_rows(hidden), plan.chunk
        kept = min(plan.held, len(padded)) if keeps else 0
        logits = hidden.new_empty(kept, len(weight))
        chunk = hidden.new_empty(min(size, len(padded)) if kept < len(padded) else 0, len(weight))
        parts: list[Measured] = []
        for first in range(0, len(hidden), size):
            part, own = padded[first : first + size], tokens[first : first + size]
            place = logits[first : first + size] if first < kept else chunk[: len(part)]
            multiply(part, head.computed, place)
            parts.append(plan.passes.measure(place[: len(own)], own, temperature))
        logprobs, entropy, log_sums = (torch.cat(each) for each in zip(*parts, strict=True))
        ctx.save_for_backward(padded, head.computed, tokens, log_sums)
        ctx.logits, ctx.size = logits, kept
        ctx.passes, ctx.head, ctx.temperature = plan.passes, head, temperature
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grads: Tensor, _: Tensor) -> tuple[Any, ...]:
        padded, computed, tokens, log_sums = ctx.saved_tensors
        size, is_kept = ctx.size, ctx.logits is not None
        logits = ctx.logits if is_kept else padded.new_empty(size, len(computed))
        ctx.logits = None  # they become gradients here; another pass would compute them again
        for_hidden, for_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(padded) if for_hidden else None
        gradient = torch.empty_like(ctx.head.weight) if for_weight else None
        for first in range(0, len(tokens), size):
            part = slice(first, first + size)
            hidden, own = padded[part], tokens[part]
            slopes = logits[: len(hidden)]
            if first or not is_kept:
                multiply(hidden, computed, slopes)
            ctx.passes.to_gradient(
                slopes[: len(own)], own, ctx.temperature, log_sums[part], grads[part]
            )
            slopes[len(own) :].zero_()
            if grad_hidden is not None:
                multiply(slopes, computed.t(), grad_hidden[part])
            if gradient is not None:
                for column in range(0, len(computed), _COLUMNS):
                    columns = slice(column, column + _COLUMNS)
                    found = slopes[:, columns].t() @ hidden
                    if first:
                        gradient[columns] += found
                    else:
                        gradient[columns] = found
        return (
            None if grad_hidden is None else grad_hidden[: len(tokens)],
            gradient,
            *(None,) * 5,
        )


def _scores(logits: Logits, temperature: float) -> Logits:
    scores = logits if logits.dtype == torch.float64 else logits.float()
    return scores if temperature == 1.0 else scores / temperature
