"""EAGLE-1 and EAGLE-3 as kinds of drafters."""

from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longtail.drafter.eagle.drafter import EagleDrafter
from longtail.drafter.eagle.fresh import commonest_tokens, fresh_drafter
from longtail.drafter.eagle.layer import EagleConfig, EagleLayer
from longtail.drafter.eagle.trainer import DrafterTrainer, TrainerSettings
from longtail.drafter.kind import DrafterKind, Lessons, trained_in
from longtail.rl.packing import pack_sequences

_SAMPLE = 16
"""Number of sequences from which a fresh drafter is scaled."""


def _fresh(config: EagleConfig, lessons: Lessons) -> tuple[EagleLayer, Int[Tensor, "draft"] | None]:
    own, sequences, size = lessons.config, lessons.sequences, config.draft_vocab_size
    ids = commonest_tokens(sequences, size, lessons.eos_ids) if size else None
    sample = pack_sequences(sequences[:_SAMPLE], own.train.tokens_per_micro_batch)[0]
    generator = torch.Generator().manual_seed(own.run.seed)
    layer = fresh_drafter(config, lessons.target, sample, generator)
    return layer.to(trained_in(lessons.target)), ids


def _trainer(
    lessons: Lessons,
    layer: EagleLayer,
    draft_ids: Int[Tensor, "draft"] | None,
    head: Float[Tensor, "draft hidden"] | None,
) -> DrafterTrainer:
    own, kind = lessons.config.train, EAGLE3 if layer.config.recipe == "eagle3" else EAGLE1
    settings = TrainerSettings(
        unroll_steps=lessons.config.drafter.unroll_steps or kind.num_unrolled,
        optimizer=own,
        total_steps=own.steps,
        matrix_rate=own.matrix_rate or None,
        autocast=own.autocast is True,
    )
    return DrafterTrainer(layer, lessons.target, settings, draft_ids=draft_ids, head=head)


EAGLE3 = DrafterKind(
    config=EagleConfig,
    layer=EagleLayer,
    drafter=EagleDrafter,
    settings=("layers", "window", "draft_vocab_size"),
    num_unrolled=5,
    fresh=_fresh,
    trainer=_trainer,
    vllm="eagle3",
    as_eagle=lambda layer: layer,
)
EAGLE1 = replace(EAGLE3, settings=("window", "draft_vocab_size"), num_unrolled=2, vllm="eagle")
