"""The architectures of drafters: what a description names, how its layer is made, how it drafts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from jaxtyping import Float, Int
from torch import Tensor

from longtail.drafter.eagle.drafter import EagleDrafter
from longtail.drafter.eagle.layer import EagleConfig, EagleLayer
from longtail.drafter.ridge.drafter import RidgeDrafter
from longtail.drafter.ridge.layer import RidgeConfig, RidgeLayer
from longtail.model.transformer import Transformer
from longtail.speculation.drafter import Drafter

DraftConfig = EagleConfig | RidgeConfig
DraftLayer = EagleLayer | RidgeLayer


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftArchitecture:
    """An architecture: its shape, its layer, and the drafter with that layer."""

    config: type[DraftConfig]
    layer: Callable[..., DraftLayer]
    drafter: Callable[..., Drafter]


_EAGLE = DraftArchitecture(config=EagleConfig, layer=EagleLayer, drafter=EagleDrafter)
ARCHITECTURES: Mapping[str, DraftArchitecture] = MappingProxyType(
    {
        "eagle1": _EAGLE,
        "eagle3": _EAGLE,
        "ridge": DraftArchitecture(
            config=RidgeConfig,
            layer=RidgeLayer,
            drafter=lambda *args, draft_ids, **_: RidgeDrafter(*args, draft_ids=draft_ids),
        ),
    }
)
"""All architectures, by recipe."""


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
