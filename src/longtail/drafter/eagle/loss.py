"""Losses of EAGLE drafters and their expected acceptance, as pure functions of states.

A row is a pair (see `drafter.eagle.layer`) that predicts one token. The target's distribution p and
the drafter's q come from the same frozen head, so the gradient of the soft cross-entropy is known:
(q - p) W. The forward pass computes it in chunks of rows; rows x vocab is never allocated whole.

    eagle1    1.0 SmoothL1(feature, target's next feature) + 0.1 CE(p || q)
    eagle3    CE(p || q)
    depth s of an unrolled drafter has the weight decay ** s   (Li et al. 2025, arXiv 2503.01840)
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from longtail.model.kernels.training_products import training_product

DECAY = 0.8
"""Weight of a depth relative to the one before it."""
FEATURE_WEIGHT, TOKEN_WEIGHT = 1.0, 0.1
"""Weights of eagle1's two terms."""
MAX_LOGITS = 2**22
"""Logits of one chunk: 16 MiB of float32 for each of the few tensors of that size."""


class RowScores(NamedTuple):
    """Scores of the drafter's predictions, by depth and row."""

    cross_entropy: Float[Tensor, "depths rows"]
    """-sum_v p(v) log q(v), nats; the only score with a gradient."""
    overlap: Float[Tensor, "depths rows"]
    """sum_v min(p(v), q(v)): acceptance of an ideal coupling at temperature 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Teacher:
    """The target's distribution on some rows: its final states and its head."""

    hidden: Float[Tensor, "rows hidden"]
    head: Float[Tensor, "vocab hidden"]
    draft_ids: Int[Tensor, "draft"] | None = None
    """Target tokens that the drafter can propose; None: all."""
    drafter_head: Float[Tensor, "draft hidden"] | None = None
    """Head of a published drafter that has its own; None: the target's."""

    @property
    def drafted(self) -> Float[Tensor, "draft hidden"]:
        """Head of the drafter."""
        if self.drafter_head is not None:
            return self.drafter_head.to(self.head)
        return self.head if self.draft_ids is None else self.head[self.draft_ids]


def score_rows(
    scored: Float[Tensor, "depths rows hidden"],
    teacher: Teacher,
    before_chunk: Callable[[], None] = lambda: None,
) -> RowScores:
    """Compare the drafter with the target, row by row; only `scored` gets a gradient.

    `before_chunk` is called before each chunk of rows, and may raise.

    With a reduced vocabulary the cross-entropy uses p restricted to it and renormalised; the
    overlap counts the tokens outside as rejected.
    """
    found = _SoftCrossEntropy.apply(scored, teacher, before_chunk)  # type: ignore[no-untyped-call]
    return RowScores(*found)


class _SoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, scored: Tensor, teacher: Teacher, before_chunk: Callable[[], None]
    ) -> tuple[Tensor, Tensor]:
        working = torch.float64 if scored.dtype == torch.float64 else torch.float32
        depths, rows, _ = scored.shape
        found = torch.empty(2, depths, rows, dtype=working, device=scored.device)
        gradient = torch.empty_like(scored) if scored.requires_grad else None
        head, ids = teacher.head, teacher.draft_ids
        drafted, size = teacher.drafted, max(MAX_LOGITS // head.shape[0], 1)
        for start in range(0, rows, size):
            part = slice(start, start + size)
            before_chunk()
            logits = _product(teacher.hidden[part].to(head.dtype), head).to(working)
            p = logits.softmax(-1)
            restricted = p if ids is None else logits[:, ids].softmax(-1)
            p = p if ids is None else p[:, ids]
            for depth in range(depths):
                logits = _product(scored[depth, part].to(head.dtype), drafted).to(working)
                q = logits.softmax(-1)
                best = q.argmax(-1)
                # log sum exp, from the entry that cannot underflow
                total = _at(logits, best) - _at(q, best).log()
                products = torch.bmm(restricted[:, None], logits[:, :, None])  # in one pass
                found[0, depth, part] = total - products[:, 0, 0]
                found[1, depth, part] = torch.minimum(p, q, out=logits).sum(-1)
                if gradient is not None:
                    error = q.sub_(restricted).to(head.dtype)  # d CE / d logits
                    gradient[depth, part] = (error @ drafted).to(gradient.dtype)
        if gradient is not None:
            ctx.save_for_backward(gradient)
        cross_entropy, overlap = found.unbind()
        ctx.mark_non_differentiable(overlap)
        return cross_entropy, overlap

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Any, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad[..., None].to(gradient.dtype), None, None


def _product(
    x: Float[Tensor, "rows hidden"], head: Float[Tensor, "vocab hidden"]
) -> Float[Tensor, "rows vocab"]:
    with torch.autocast(x.device.type, enabled=False):  # the head's dtype is chosen by the caller
        return training_product(x, head, None)


def _at(x: Float[Tensor, "rows vocab"], ids: Int[Tensor, "rows"]) -> Float[Tensor, "rows"]:
    return x.gather(1, ids[:, None])[:, 0]
