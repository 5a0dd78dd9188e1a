"""The interface between a causal language model and what trains it.

    packed sequences --> hidden --> chosen rows --> logits, or products with score_head --> scores

`model.hf.model.PolicyTransformer` is our decoder; `model.hf.causal.CausalModel` runs the modelling
code of transformers. Losses, optimizers and files of a run are unknown here.
"""

import abc
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor, nn

from longtail.model.kernels.scores import Head
from longtail.types import PackedSequences


class Scorer(abc.ABC):
    """A causal language model that scores tokens."""

    @property
    @abc.abstractmethod
    def device(self) -> torch.device:
        """Device of the parameters."""

    @abc.abstractmethod
    def hidden(
        self, packed: PackedSequences, *, recompute: bool = False
    ) -> Float[Tensor, "at_least_tokens hidden"]:
        """Return the last hidden states of packed sequences; attention stays within each.

        `recompute`: activations inside layers are computed again in the backward pass.
        """

    @abc.abstractmethod
    def logits(self, hidden: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows vocab"]:
        """Return the logits of the next token."""

    @abc.abstractmethod
    def score_head(self) -> Head:
        """Return the weight of the LM head, in the dtype of autocast if that is enabled."""


class Policy(nn.Module, Scorer):
    """A causal language model whose parameters can be learned."""

    @property
    @abc.abstractmethod
    def dtype(self) -> torch.dtype:
        """Dtype of the parameters."""

    @abc.abstractmethod
    def trainable(self) -> dict[str, nn.Parameter]:
        """Return the parameters that are learned, by the model's own names; a tied head once."""

    @abc.abstractmethod
    def published(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all weights by Hugging Face's names, a tied head once; some share memory."""

    @abc.abstractmethod
    def reference(self) -> Scorer:
        """Return the policy before it learns, frozen."""

    @abc.abstractmethod
    def save(self, path: Path, eos_ids: Sequence[int], bos_id: int | None = None) -> None:
        """Write what `read` needs, in Hugging Face's files. Raises CheckpointError."""

    @abc.abstractmethod
    def read(self, path: Path) -> Mapping[str, Tensor]:
        """Read the learned parameters that `save` wrote, by the names of `trainable`."""

    def fuse(self) -> None:
        """Prepare for training: select fused kernels with gradients where they exist."""

    def hold_casts(self, dtype: torch.dtype | None) -> None:
        """Convert matrices for autocast once for many passes, if the model can; None drops them."""
