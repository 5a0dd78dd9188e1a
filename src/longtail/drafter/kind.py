"""Interface of a trainable kind of drafter: all that code outside its folder needs of it.

DraftConfig --layer--> DraftLayer --drafter--> Drafter
                           ^-- fresh, trainer: `longtail drafter train`
"""

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from longtail.config.drafter import DrafterTrainConfig
from longtail.config.sections import Amount
from longtail.model.transformer import ModelConfig, Transformer
from longtail.rl.data.examples import Example
from longtail.speculation.drafter import Drafter, Taps
from longtail.types import PackedSequences


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig(abc.ABC):
    """Shape of a drafter's layer; `drafter.json` has its fields."""

    recipe: str
    """Name of its kind."""
    target: ModelConfig
    draft_vocab_size: Amount = 0
    """Number of tokens that can be drafted; 0: all."""

    @property
    @abc.abstractmethod
    def taps(self) -> Taps:
        """Target states that the layer reads."""

    @property
    def max_depth(self) -> int | None:
        """Most tokens of a chain; None: no limit."""
        return None


class DraftLayer(nn.Module):
    """A drafter's own parameters; the target's embedding and head are arguments, never copied."""

    config: DraftConfig

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the parameters."""
        return next(self.parameters()).dtype

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return next(self.parameters()).device


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthReport:
    """Agreement of drafter and target on given sequences, at depth 1, 2, ..."""

    overlap: tuple[float, ...] = ()
    """Mean of sum_v min(p, q)."""

    @property
    def accept_len(self) -> float:
        """Expected tokens per verify step of a chain of these depths under an ideal coupling."""
        total, reached = 1.0, 1.0
        for overlap in self.overlap:
            reached *= overlap
            total += reached
        return total

    @staticmethod
    def of(overlaps: Float[Tensor, "depths"], counts: Sequence[int]) -> "DepthReport":
        """Return the means of sums over `counts` rows."""
        return DepthReport(overlap=tuple((overlaps / torch.tensor(counts)).tolist()))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerReport:
    """Result of one step."""

    num_tokens: int
    num_trained: int
    """Tokens whose prediction at depth 1 was in the loss."""
    num_reused: int = 0
    """Number of these whose target states were looked up, not computed."""
    loss: float = 0.0
    """This and the others are those of gradients; a drafter that learns by sums has none."""
    depths: DepthReport = field(default_factory=DepthReport)
    grad_norm: float = 0.0
    learning_rate: float = 0.0


@runtime_checkable
class LayerTrainer(Protocol):
    """Trains a layer on packed sequences of its target, which it never writes."""

    steps: int

    @property
    def layer(self) -> DraftLayer:
        """The layer with what is learned so far."""

    @property
    def draft_ids(self) -> Int[Tensor, "draft"] | None:
        """Target tokens that the drafter can propose; None: all."""

    @property
    def head(self) -> Float[Tensor, "draft hidden"] | None:
        """Head of the drafter; None: the target's."""

    @property
    def sums(self) -> Mapping[str, Tensor]:
        """Sums that the weights follow from; empty if they follow from gradients."""

    def step(self, batch: Sequence[PackedSequences]) -> TrainerReport:
        """Learn a batch of micro-batches; DataError if it has no token to learn."""

    def evaluate(self, batch: Sequence[PackedSequences], num_depths: int) -> DepthReport:
        """Measure on sequences without training."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the state of the training."""

    def restore(self, steps: int, tensors: Mapping[str, Tensor]) -> None:
        """Restore the state after `steps` steps; CheckpointError if of another drafter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lessons:
    """The target, sequences and settings of the training of a layer."""

    config: DrafterTrainConfig
    target: Transformer
    eos_ids: Sequence[int]
    sequences: Sequence[Example]


def trained_in(target: Transformer) -> torch.dtype:
    """Return the type that a drafter of a target is trained in."""
    return torch.float64 if target.dtype == torch.float64 else torch.float32


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterKind:
    """A kind of drafter with weights."""

    config: type[Any]
    """A frozen dataclass, which extends `DraftConfig`."""
    layer: Callable[[Any], DraftLayer]
    """Makes an empty layer."""
    drafter: Callable[..., Drafter]
    """Makes the drafter of a layer and its target, with `draft_ids` and `head`."""
    settings: tuple[str, ...]
    """Fields of `DrafterSection` that are fields of `config`, too."""
    num_unrolled: int
    """Number of trained depths if `drafter.unroll_steps` is not set."""
    fresh: Callable[[Any, Lessons], tuple[DraftLayer, Int[Tensor, "draft"] | None]]
    """Makes a layer to train, and the ids of its draft vocabulary."""
    trainer: Callable[..., LayerTrainer]
    """Makes the trainer of a layer: (lessons, layer, draft_ids, head)."""
    sums: type[Any] | None = None
    """Sums that its weights follow from, with `kinds` and `check`; None: it learns by gradient."""
    vllm: str | None = None
    """vLLM's method for it, LEARNED, or none."""
    as_eagle: Callable[[Any], Any] | None = None
    """Makes the nearest EAGLE layer, for other engines."""


LEARNED = "learned"
"""Name of the drafter that vLLM learns by itself (`longtail.vllm.learned`)."""
