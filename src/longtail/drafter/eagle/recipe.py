"""The recipe of a fresh drafter: what follows from the target where nothing else is chosen.

Each choice was measured on a real model by trained tokens; docs/drafters.md has the table.
"""

from dataclasses import dataclass
from typing import final

from longtail.drafter.eagle.layer import EagleConfig, Recipe
from longtail.model.transformer import ModelConfig

_DRAFT_VOCAB = 8192
_FIT_TOKENS, _FIT_BYTES = 131_072, 2**28
"""Most tokens of the closed-form start, and most memory for their rows."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterRecipe:
    """Shape and training of a fresh drafter.

    Example: recipe_for(config).draft_vocab_size == 8192 for a vocabulary of 49,152
    """

    recipe: Recipe = "eagle1"
    """eagle1: its input has the next token's embedding beside the feature, so a regression alone
    drafts (`drafter.eagle.fit`); eagle3 learns the same by gradient, from far more tokens."""
    layers: tuple[int, ...] = ()
    """Tapped layers, of eagle3 only."""
    window: int = 64
    """Tokens that the layer attends to. It bounds memory and the catching up after plain steps."""
    draft_vocab_size: int = 0
    """Number of tokens that can be drafted; 0: all. The head is most of a draft's work: for 49,152
    tokens of width 576 it has 28M weights, the layer 5M."""
    unroll_steps: int = 2
    """Trained depths; predicted features stay near the target's, so the first ones suffice."""
    learning_rate: float = 1e-3
    """Rate of AdamW, for norms; for all weights if `matrix_rate` is None."""
    matrix_rate: float | None = 0.001
    """Rate of Muon, for matrices."""
    batch_tokens: int = 1024
    """Tokens of an update, prompts included."""
    fit_tokens: int = 0
    """Trained tokens of the closed-form start; gradient steps follow. 0: none."""

    def config(self, target: ModelConfig) -> EagleConfig:
        """Return the shape of a drafter for `target`."""
        return EagleConfig(
            recipe=self.recipe,
            target=target,
            layers=self.layers,
            window=self.window,
            draft_vocab_size=self.draft_vocab_size,
        )


def recipe_for(target: ModelConfig) -> DrafterRecipe:
    """Return the recipe of a fresh drafter for a target of this shape.

    A vocabulary of at most twice the reduced size is drafted whole: a renewal would cost more than
    the smaller head saves.
    """
    is_large = target.vocab_size > 2 * _DRAFT_VOCAB
    row_bytes = 3 * target.hidden_size * 2
    return DrafterRecipe(
        draft_vocab_size=_DRAFT_VOCAB if is_large else 0,
        fit_tokens=min(_FIT_TOKENS, _FIT_BYTES // row_bytes),
    )
