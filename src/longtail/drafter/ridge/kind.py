"""The `DrafterKind` of the ridge drafter."""

from typing import Any

import torch

from longtail.drafter.kind import LEARNED, DrafterKind, Lessons, trained_in
from longtail.drafter.ridge.drafter import RidgeDrafter
from longtail.drafter.ridge.layer import RidgeConfig, RidgeLayer
from longtail.drafter.ridge.sums import LagSums
from longtail.drafter.ridge.trainer import RidgeTrainer, as_eagle


def _fresh(config: RidgeConfig, lessons: Lessons) -> tuple[RidgeLayer, None]:
    return RidgeLayer(config).to(lessons.target.device, trained_in(lessons.target)), None


def _trainer(lessons: Lessons, layer: RidgeLayer, *_: Any) -> RidgeTrainer:
    always = torch.tensor(lessons.eos_ids)  # other ids follow from the sequences
    return RidgeTrainer(layer, lessons.target, draft_ids=always)


RIDGE = DrafterKind(
    config=RidgeConfig,
    layer=RidgeLayer,
    drafter=RidgeDrafter,
    settings=("slots",),
    num_unrolled=1,
    fresh=_fresh,
    trainer=_trainer,
    sums=LagSums,
    vllm=LEARNED,
    as_eagle=as_eagle,
)
