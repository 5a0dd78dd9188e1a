"""The architectures of drafters: one entry names all that the rest of the library needs of one.

a description, an empty layer, a fresh layer     its shape and its weights
a drafter                                        taps, proposals, statistics of its texts
a trainer                                        the weights that given texts lead to
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from longtail.drafter.eagle.drafter import EagleDrafter
from longtail.drafter.eagle.fresh import fresh_drafter
from longtail.drafter.eagle.layer import EagleConfig, EagleLayer
from longtail.drafter.ridge.as_eagle import as_eagle, regress
from longtail.drafter.ridge.drafter import RidgeDrafter
from longtail.drafter.ridge.layer import RidgeConfig, RidgeLayer
from longtail.drafter.ridge.sums import TextSums
from longtail.drafter.ridge.trainer import RidgeTrainer
from longtail.drafter.training.eagle import DrafterTrainer
from longtail.model.transformer import ModelConfig, Transformer
from longtail.speculation.drafter import Drafter, Statistics

DraftConfig = EagleConfig | RidgeConfig
DraftLayer = EagleLayer | RidgeLayer
Trainer = DrafterTrainer | RidgeTrainer


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftArchitecture:
    """An architecture: its shape, its layer, the drafter with that layer, and its training."""

    config: type[DraftConfig]
    layer: Callable[..., DraftLayer]
    fresh: Callable[..., DraftLayer]
    """Makes one from a description, a target, a sample of its texts and a random generator."""
    drafter: Callable[..., Drafter]
    trainer: Callable[..., Trainer]
    """Makes one from a layer, a target and settings, `draft_ids` and `head`."""
    regress: Callable[..., int] | None = None
    """Starts a fresh layer from a regression over texts; None: it cannot, or needs none."""
    statistics: Callable[..., Statistics] | None = None
    """Makes, from a layer and a target, sums from which the weights follow; None: by gradient."""
    as_eagle: Callable[..., EagleLayer] = lambda layer: layer
    """Returns the nearest layer that other engines read."""


_EAGLE = DraftArchitecture(
    config=EagleConfig,
    layer=EagleLayer,
    fresh=fresh_drafter,
    drafter=EagleDrafter,
    trainer=DrafterTrainer,
    regress=regress,
)
ARCHITECTURES: Mapping[str, DraftArchitecture] = MappingProxyType(
    {
        "eagle1": _EAGLE,
        "eagle3": _EAGLE,
        "ridge": DraftArchitecture(
            config=RidgeConfig,
            layer=RidgeLayer,
            fresh=lambda config, target, *_: RidgeLayer(config).to(target.device),
            drafter=lambda *args, draft_ids, **_: RidgeDrafter(*args, draft_ids=draft_ids),
            trainer=lambda layer, target, _, *, draft_ids, head: RidgeTrainer(
                layer, target, draft_ids=draft_ids
            ),
            statistics=lambda layer, target: TextSums(target, layer.config.slots),
            as_eagle=as_eagle,
        ),
    }
)
"""All architectures, by recipe."""


def describe(recipe: str, target: ModelConfig, **options: Any) -> DraftConfig:
    """Return the shape of a drafter, from those of the options that its architecture has."""
    config = ARCHITECTURES[recipe].config
    known = {field.name for field in fields(config)}
    own = {name: value for name, value in options.items() if name in known}
    return config(recipe=recipe, target=target, **own)  # type: ignore[arg-type]


def learning_layer(target: ModelConfig, draft_vocab_size: int) -> DraftLayer:
    """Return the layer of a drafter that begins a run without weights and learns during it."""
    return RidgeLayer(RidgeConfig(target=target, draft_vocab_size=draft_vocab_size))


def make_layer(config: DraftConfig) -> DraftLayer:
    """Return an empty layer."""
    return ARCHITECTURES[config.recipe].layer(config)


def make_drafter(
    layer: DraftLayer,
    target: Transformer,
    *,
    draft_ids: Int[Tensor, "draft_vocab"] | None = None,
    head: Float[Tensor, "draft_vocab hidden"] | None = None,
    window: int | None = None,
) -> Drafter:
    """Return a drafter that owns the layer; `window` is of those with a window."""
    make = ARCHITECTURES[layer.config.recipe].drafter
    return make(layer, target, draft_ids=draft_ids, head=head, window=window)
