"""Rollouts of `longtail bench gpu`: with speculation and without, at several batch sizes.

The tiny reasoner and its drafter are grown to a large shape (`bench.common.grown`): speed is that
of the shape, acceptance that of the small model. Its vocabulary stays small, so sampling and the
head cost less than at full size; other parts of the benchmark time those.
"""

from collections.abc import Sequence
from typing import Any

import torch

from longtail.bench.common import grown
from longtail.bench.common.play import differing_share
from longtail.bench.common.process import Log
from longtail.bench.gpu.steps import random_model
from longtail.bench.rollout.measure import Cell
from longtail.bench.rollout.subjects import Subject, eagle_maker, tiny_reasoner, tiny_subject
from longtail.drafter.eagle.layer import EagleConfig, EagleLayer
from longtail.engine.speculation.speculator import Speculation
from longtail.model.transformer import ModelConfig
from longtail.speculation.strategy import Strategy
from longtail.tuner.budget import BudgetTuner
from longtail.types import SamplingParams

_DRAFTER = "eagle1"


def grown_subject(large: ModelConfig, device: torch.device) -> Subject:
    """Return the tiny reasoner in a large shape."""
    target, layers = tiny_reasoner("bfloat16", (_DRAFTER,))
    small, layer = target.model.to(device), layers[_DRAFTER].to(device)
    shape = grown.grown_shape(small.config, large)
    with torch.device(device):  # not by way of the host
        model, drafter = grown.grow_target(small, shape), grown.grow_drafter(layer, shape)
    return tiny_subject("grown", target, model, {_DRAFTER: drafter})


def random_subject(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Subject:
    """Return a toy with random weights, whose drafts are mostly wrong."""
    model = random_model(config, dtype, device)
    layer = EagleLayer(EagleConfig(recipe="eagle1", target=config))
    layer.initialize(torch.Generator().manual_seed(0))
    return Subject(
        name="random",
        model=model,
        decode=lambda tokens: "",
        prompts=[(1, 2, 3 + i) for i in range(12)],
        sampling=SamplingParams(max_tokens=24),
        drafters={_DRAFTER: eagle_maker(layer.to(device, dtype), model)},
    )


def changes_no_bit(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether batch-invariant drafting leaves every bit of tokens and logprobs unchanged."""
    subject = random_subject(config, dtype, device)
    subject.model.batch_invariant = True
    engine = subject.engine(8)
    plain = engine.generate(subject.requests())
    shape = Strategy(depth=3, width=2, size=5, beam=2)
    engine.speculate(Speculation.fixed(subject.drafters[_DRAFTER](), shape))
    drafted = engine.generate(subject.requests())
    return all(
        (one.tokens, one.logprobs) == (other.tokens, other.logprobs)
        for one, other in zip(plain, drafted, strict=True)
    )


def speculation(
    subject: Subject, batches: Sequence[int], tokens: int, log: Log
) -> list[dict[str, Any]]:
    """Measure plain decoding beside the budget tuner; only steps with a full batch count."""
    cells = []
    for batch in batches:
        budget = Speculation(drafters=(subject.drafters[_DRAFTER](),), tuner=BudgetTuner())
        contestants = {"off": None, "budget": budget}
        turns = Cell(subject, batch).turns(contestants, tokens * max(1, batch // 4))
        off, on = turns["off"], turns["budget"]
        cells.append(
            {
                "batch": batch,
                "off_tokens_per_s": off.tokens_per_s,
                "tokens_per_s": on.tokens_per_s,
                "speedup": on.tokens_per_s / off.tokens_per_s,
                "accept_length": on.accept_length,
                "differing_share": differing_share(off.texts, on.texts),
                "tuner_share": on.report.tuner_share,
                "off_gap_us": off.report.gap_s / off.report.num_steps * 1e6,
                "gap_us": on.report.gap_s / on.report.num_steps * 1e6,
                "draft_forward_share": on.report.draft_forward_s / on.report.seconds,
            }
        )
        log(f"speculation: {batch} running")
    return cells
