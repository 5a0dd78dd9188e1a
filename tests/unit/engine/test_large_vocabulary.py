"""A large vocabulary: generated tokens x vocabulary never exists whole while learning."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from longtail.config.rl import LearnerSection
from longtail.model.hf.model import PolicyTransformer
from longtail.rl.learner import Learner
from longtail.rl.logprobs import score
from support.rank_processes import Plan
from support.tiny_models import tiny_config

VOCAB = 20_000
GENERATED, ROWS_AT_ONCE = 1024, 128
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


@pytest.mark.slow
@pytest.mark.parametrize("rows", [ROWS_AT_ONCE, GENERATED])
def test_scores_of_all_generated_tokens_exist_only_where_they_are_allowed_to(rows, monkeypatch):
    """Four times the limit are kept at most, which PyTorch's operations need for their copies."""
    monkeypatch.setattr("longtail.rl.learner.score", partial(score, max_logits=rows * VOCAB))
    model = PolicyTransformer(replace(tiny_config("qwen2", VOCAB), hidden_size=HIDDEN))
    model.initialize(torch.Generator().manual_seed(0))
    learner = Learner(model, LearnerSection(gradient_checkpointing=True))
    plan = Plan(seed=3, lengths=((4, GENERATED // 2),) * 2, budget=2000)
    with Sizes() as sizes:
        report = learner.step(plan.batches())
    assert report.metrics["actor/grad_norm"] > 0
    assert sizes.largest <= 4 * rows * VOCAB
    assert (sizes.largest < GENERATED * VOCAB) == (rows < GENERATED)
