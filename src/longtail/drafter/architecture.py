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
    """An architecture: its shape and its layer."""

    config: type[DraftConfig]
    layer: Callable[..., DraftLayer]


_EAGLE = DraftArchitecture(config=EagleConfig, layer=EagleLayer)
ARCHITECTURES: Mapping[str, DraftArchitecture] = MappingProxyType(
    {
        "eagle1": _EAGLE,
        "eagle3": _EAGLE,
        "ridge": DraftArchitecture(config=RidgeConfig, layer=RidgeLayer),
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
    if isinstance(layer, RidgeLayer):
        return RidgeDrafter(layer, target, draft_ids=draft_ids)
    return EagleDrafter(layer, target, draft_ids=draft_ids, head=head, window=window)
