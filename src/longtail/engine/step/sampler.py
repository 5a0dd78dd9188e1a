"""The sampler: from logits to tokens, with keyed noise that is hashed where it is added."""

from collections.abc import Sequence
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from longtail.engine.batch import Scheduled
from longtail.engine.request import ActiveRequest
from longtail.model.kernels.draws import select_draws
from longtail.model.transformer import Transformer
from longtail.sampling import Drawn, draw_rows, gumbel_noise
from longtail.speculation.drafter import Noise
from longtail.speculation.tree import depths


@final
class Sampler:
    """Draws the tokens of a step, and gives drafters the noise of positions without a token yet.

    A native kernel hashes the noise; without one, and in float64, PyTorch's operations do.
    """

    def __init__(self, model: Transformer) -> None:
        self._vocab_size, self._draws = model.config.vocab_size, select_draws(model.dtype)

    def for_drafts(self, requests: Sequence[ActiveRequest]) -> Noise:
        """Return noise for drafts, valid until the requests' next tokens."""
        keys = [active.request.noise_key for active in requests]
        return Noise(keys, [len(active.tokens) for active in requests], self._vocab_size)

    def draw(self, logits: Float[Tensor, "drawing vocab"], drawing: Sequence[Scheduled]) -> Drawn:
        """Draw after the last token of every request, and after every node of its draft.

        Each row has its own noise and parameters.
        """
        keys, positions, params = [], [], []
        for each in drawing:
            request, offsets = each.active.request, [0, *depths(each.draft.parents)]
            keys += [request.noise_key] * len(offsets)
            positions += [len(each.active.tokens) + offset for offset in offsets]
            params += [request.sampling] * len(offsets)
        if self._draws is not None:
            return self._draws.draw_rows(logits, keys, positions, params)
        row_keys, places = torch.tensor([keys, positions])
        return draw_rows(logits, gumbel_noise(row_keys, places, self._vocab_size), params)
