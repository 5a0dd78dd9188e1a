"""Rollouts of `longtail bench gpu`: with speculation and without, at several batch sizes.

The tiny reasoner and its drafter are grown to a large shape (`bench.common.grown`): speed is the
shape's, acceptance the small one's. Its vocabulary stays small, so sampling and the head cost less
than theirs would; other parts of the bench time those.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from longtail.bench.common import grown
from longtail.bench.gpu.steps import random_model
from longtail.bench.rollout.measure import Cell, Subject, differing_share, engine_of, requests_of
from longtail.bench.rollout.subjects import hailstones, tiny_reasoner, tiny_sampling
from longtail.drafter.eagle.drafter import EagleDrafter
from longtail.drafter.eagle.layer import EagleConfig, EagleLayer
from longtail.engine.speculation.speculator import Speculation
from longtail.model.transformer import ModelConfig
from longtail.speculation.drafter import Drafter
from longtail.speculation.strategy import Strategy
from longtail.tuner.budget import BudgetTuner
from longtail.types import SamplingParams

_DRAFTER = "eagle1"


def grown_shape(small: ModelConfig, large: ModelConfig) -> ModelConfig:
    """Return the small model's own shape with the large one's sizes, but for the vocabulary."""
    return replace(
        small,
        hidden_size=large.hidden_size,
        intermediate_size=large.intermediate_size,
        num_layers=large.num_layers,
        num_heads=large.num_heads,
        num_kv_heads=large.num_kv_heads,
        head_dim=large.head_dim,
        norm_eps=small.norm_eps * small.hidden_size / large.hidden_size,
    )


def grown_subject(large: ModelConfig, device: torch.device, say: Callable[[str], None]) -> Subject:
    """The tiny reasoner in a large shape; taught first where it was never taught, in minutes."""
    target, layers = tiny_reasoner("bfloat16", (_DRAFTER,), say)
    small, layer = target.model.to(device), layers[_DRAFTER].to(device)
    shape = grown_shape(small.config, large)
    with torch.device(device):  # not by way of the host
        model, drafter = grown.grow_target(small, shape), grown.grow_drafter(layer, shape)
    return Subject(
        name="grown",
        model=model,
        decode=target.tokenizer.decode,
        prompts=hailstones(target.tokenizer),
        sampling=tiny_sampling(target),
        drafters={_DRAFTER: lambda: EagleDrafter(copy.deepcopy(drafter), model)},
    )


def random_subject(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Subject:
    """A toy that knows nothing: it tries the bench, and its drafts are mostly wrong."""
    model = random_model(config, dtype, device)
    layer = EagleLayer(EagleConfig(recipe="eagle1", target=config))
    layer.initialize(torch.Generator().manual_seed(0))

    def drafter() -> Drafter:
        return EagleDrafter(copy.deepcopy(layer).to(device, dtype), model)

    return Subject(
        name="random",
        model=model,
        decode=lambda tokens: "",
        prompts=[(1, 2, 3 + i) for i in range(12)],
        sampling=SamplingParams(max_tokens=24),
        drafters={_DRAFTER: drafter},
    )


def changes_no_bit(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Tell whether drafts leave every bit of tokens and logprobs, batch-invariant as they are."""
    subject = random_subject(config, dtype, device)
    subject.model.batch_invariant = True
    engine = engine_of(subject, 8)
    plain = engine.generate(requests_of(subject))
    shape = Strategy(depth=3, width=2, size=5, beam=2)
    engine.speculate(Speculation.fixed(subject.drafters[_DRAFTER](), shape))
    drafted = engine.generate(requests_of(subject))
    return all(
        (one.tokens, one.logprobs) == (other.tokens, other.logprobs)
        for one, other in zip(plain, drafted, strict=True)
    )


def speculation(
    subject: Subject, batches: Sequence[int], tokens: int, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Plain decoding beside the budget tuner, the same texts; steps with every place taken."""
    cells = []
    for batch in batches:
        budget = Speculation(drafters=(subject.drafters[_DRAFTER](),), tuner=BudgetTuner())
        turns = Cell(subject, batch).turns(
            {"off": None, "budget": budget}, tokens * max(1, batch // 4)
        )
        off, on = turns["off"], turns["budget"]
        cells.append(
            {
                "batch": batch,
                "off_tokens_per_s": off.tokens_per_s,
                "tokens_per_s": on.tokens_per_s,
                "speedup": on.tokens_per_s / off.tokens_per_s,
                "accept_length": on.accept_length,
                "differing_share": differing_share(off.texts, on.texts),
                "tuner_share": on.tuner_share,
                "off_gap_us": off.gap_s * 1e6,
                "gap_us": on.gap_s * 1e6,
                "draft_forward_share": on.draft_forward_share,
            }
        )
        say(f"speculation: {batch} running")
    return cells
