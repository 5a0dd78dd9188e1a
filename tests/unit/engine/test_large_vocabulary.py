"""A vocabulary of 150k: generated tokens x vocabulary never exists whole while learning."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from longtail.model.transformer import Transformer
from longtail.rl.learner import Learner, LearnerSettings
from support.rank_processes import Plan
from support.tiny_models import tiny_config

VOCAB = 150_000
GENERATED, ROWS_AT_ONCE = 64, 16
HIDDEN = 8
"""So small that no weight is as large as the scores that are looked for."""


class Sizes(TorchDispatchMode):
    """Records the most numbers of any tensor that an operation returned, forward or backward."""

    largest = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.largest = max(self.largest, leaf.numel())
        return result


def sizes_of_a_step(max_logits: int) -> tuple[int, int]:
    """The largest tensor of a learner step, and how many scores autograd kept for its backward."""
    model = Transformer(replace(tiny_config("qwen2", VOCAB), hidden_size=HIDDEN))
    model.initialize(torch.Generator().manual_seed(0))
    learner = Learner(model, LearnerSettings(max_logits=max_logits, recompute=True))
    plan = Plan(seed=3, lengths=((4, GENERATED // 2),) * 2, budget=1000)
    kept = 0

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += tensor.numel() if tensor.shape[-1:] == (VOCAB,) else 0
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), Sizes() as sizes:
        report = learner.step(plan.batches())
    assert report.grad_norm > 0
    return sizes.largest, kept


@pytest.mark.slow
@pytest.mark.parametrize("is_chunked", [True, False])
def test_scores_of_all_generated_tokens_exist_only_where_they_are_allowed_to(is_chunked):
    rows = ROWS_AT_ONCE if is_chunked else GENERATED
    largest, kept = sizes_of_a_step(rows * VOCAB)
    assert largest == rows * VOCAB
    # Chunks are computed again in the backward pass, one at a time, so that none is kept till then.
    assert (kept == 0) == is_chunked
