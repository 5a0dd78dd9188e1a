"""A drafter's tensors: versions, averages, loading into a layer; the head it drafts with.

The target's embedding and head are never among them: every receiver has the target. The token ids
of a reduced draft vocabulary are one more tensor, so that a renewed one travels like weights.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast, final

import torch
from jaxtyping import Int
from torch import Tensor, nn

from longtail.errors import CheckpointError, ConfigError
from longtail.model.kernels.linear import Linear
from longtail.model.transformer import Transformer
from longtail.system.machine import MAX_INT32
from longtail.system.tensor_files import Kind, kinds_of, require

_T = TypeVar("_T")
DRAFT_IDS = "draft_ids"
"""Name of the target's token ids of a reduced draft vocabulary, among a drafter's tensors."""


def wanted_ids(vocab_size: int, size: int | None = None) -> Kind:
    """Return what the ids of a reduced draft vocabulary must be; None: of any size."""
    return Kind(shape=(size,), dtypes=("int64",), below=vocab_size, is_distinct=True)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterWeights:
    """A published drafter. Tensors are never modified after publication."""

    version: int
    tensors: Mapping[str, Tensor]
    """Tensors by their parameter name in the layer; also `DRAFT_IDS` if it is reduced."""
    num_tokens: int = 0
    """Tokens that all versions were trained on in this run."""
    vocab_size: int = MAX_INT32
    """Number of the target's tokens."""


def copy_parameters(
    layer: nn.Module, draft_ids: Int[Tensor, "draft"] | None = None
) -> dict[str, Tensor]:
    """Copy a drafter's parameters and, if given, the ids of its draft vocabulary."""
    parameters = {name: p.detach().clone() for name, p in layer.named_parameters()}
    return parameters if draft_ids is None else {**parameters, DRAFT_IDS: draft_ids.clone()}


def check_parameters(
    tensors: Mapping[str, Tensor], own: Mapping[str, Tensor], vocab_size: int
) -> None:
    """Raise CheckpointError unless tensors have names and shapes of a drafter's own.

    The ids of a draft vocabulary may be among both.
    """
    ids, where = wanted_ids(vocab_size), "state of another drafter"
    wanted = {n: Kind(shape=tuple(each.shape)) for n, each in own.items() if n != DRAFT_IDS}
    try:
        require(where, kinds_of(tensors), wanted | dict.fromkeys({DRAFT_IDS} & tensors.keys(), ids))
    except ConfigError as error:
        raise CheckpointError(str(error)) from error
    if DRAFT_IDS in tensors and (fault := ids.fault(tensors[DRAFT_IDS])):
        raise CheckpointError(f"{where}: {DRAFT_IDS} {fault}")


def load_parameters(layer: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy parameters into a layer; raise CheckpointError, before any change, if they misfit."""
    own, config = dict(layer.named_parameters()), cast(Any, layer).config
    check_parameters(tensors, own, config.target.vocab_size)
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(tensors[name])


def are_finite(tensors: Mapping[str, Tensor]) -> bool:
    """Return whether no value is NaN or infinite; a GPU is waited for once."""
    # Minimum and maximum in one pass: both are NaN if any value is.
    ends = [torch.stack(each.aminmax()).double() for each in tensors.values()]
    return not ends or bool(torch.cat(ends).isfinite().all())


def weighted_mean(
    several: Sequence[Mapping[str, Tensor]], weights: Sequence[int]
) -> dict[str, Tensor]:
    """Average tensors of the same names; equal tensors, as those of ids are, keep every bit.

    Sums float64 differences from the first, weighted.
    """
    total, first = sum(weights), several[0]
    assert total > 0, "the weights sum to zero"
    mean = {}
    for name, tensor in first.items():
        start = tensor.double()
        moved = start.clone()
        for other, weight in zip(several[1:], weights[1:], strict=True):
            moved += (other[name].double() - start) * (weight / total)
        mean[name] = moved.to(tensor.dtype)
    return mean


def drafting_head(
    target: Transformer, draft_ids: Int[Tensor, "draft"] | None, own: Tensor | None = None
) -> Linear:
    """Return the packed head of a drafter: its own rows, those of the draft vocabulary, or all."""
    if own is None and draft_ids is None:
        return target.head
    rows = target.head.weight[draft_ids] if own is None else own
    head = Linear(rows.shape[1], len(rows))
    head.weight.data = rows.to(target.device, target.dtype)
    head.pack()
    return head


def with_prefix(prefix: str, tensors: Mapping[str, _T]) -> dict[str, _T]:
    """Return tensors, or their kinds, with a prefix before each name."""
    return {prefix + name: tensor for name, tensor in tensors.items()}


def without_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose names begin with a prefix, without it."""
    return {n.removeprefix(prefix): tensor for n, tensor in tensors.items() if n.startswith(prefix)}
