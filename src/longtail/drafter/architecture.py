"""The architectures of drafters: from a recipe or a shape to the layer and its drafter."""

from collections.abc import Mapping
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
CONFIGS: Mapping[str, type[DraftConfig]] = MappingProxyType(
    {"eagle1": EagleConfig, "eagle3": EagleConfig, "ridge": RidgeConfig}
)
"""The shape of each recipe."""


def make_layer(config: DraftConfig) -> DraftLayer:
    """Return an empty layer."""
    return RidgeLayer(config) if isinstance(config, RidgeConfig) else EagleLayer(config)


def make_drafter(
    layer: DraftLayer,
    target: Transformer,
    *,
    draft_ids: Int[Tensor, "draft_vocab"] | None = None,
    head: Float[Tensor, "draft_vocab hidden"] | None = None,
) -> Drafter:
    """Return a drafter that owns the layer; only EAGLE drafters have a `head` of their own."""
    if isinstance(layer, RidgeLayer):
        return RidgeDrafter(layer, target, draft_ids=draft_ids)
    return EagleDrafter(layer, target, draft_ids=draft_ids, head=head)
