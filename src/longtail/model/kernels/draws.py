"""Draws tokens with keyed noise that is hashed where it is added (draws.c), not stored.

With a vocabulary of 150k entries the noise is as large as the logits.
"""

from collections.abc import Callable, Sequence
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from longtail.model.kernels import native
from longtail.sampling import Drawn, draw_rows, gumbel_noise
from longtail.types import SamplingParams

_BLOCK = 128
"""Entries of a block of draws.c."""


@final
class NativeDraws:
    """Sampling by draws.c: rows of logits in float32 or bfloat16 on a CPU.

    Tokens are those of `sampling.draw`, which computes the rows that draws.c cannot decide.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function
        self._scratch = torch.empty(0)

    def draw_rows(
        self,
        logits: Float[Tensor, "rows vocab"],
        keys: Sequence[int],
        positions: Sequence[int],
        params: Sequence[SamplingParams],
    ) -> Drawn:
        """Sample each row with its own parameters in one pass."""
        assert logits.stride(1) == 1, "entries of a row are contiguous"
        rows, vocab = logits.shape
        threads = torch.get_num_threads()
        room = 4 * (-(-vocab // _BLOCK) + 1) * _BLOCK
        if self._scratch.numel() < threads * room:
            self._scratch = torch.empty(threads * room)
        limits = [min(each.top_k, vocab) for each in params]
        numbers = torch.tensor([keys, positions, limits])
        shares = torch.tensor(
            [
                [each.temperature for each in params],
                [each.top_p for each in params],
                [each.min_p for each in params],
            ],
            dtype=torch.float64,
        )
        tokens = torch.empty(rows, dtype=torch.int64)
        logprobs = torch.empty(rows)
        self._function(
            logits, logits.stride(0), rows, vocab, numbers, shares, self._scratch, room, tokens,
            logprobs, threads,
        )  # fmt: skip
        undecided = [row for row, token in enumerate(tokens.tolist()) if token < 0]
        if undecided:
            noise = gumbel_noise(numbers[0, undecided], numbers[1, undecided], vocab)
            again = draw_rows(logits[undecided], noise, [params[row] for row in undecided])
            tokens[undecided], logprobs[undecided] = again.tokens, again.logprobs
        return Drawn(tokens=tokens, logprobs=logprobs)


def select_draws(dtype: torch.dtype) -> NativeDraws | None:
    """Return the native sampling; None where there is none."""
    functions = native.functions(dtype)
    return None if functions is None else NativeDraws(functions["draw_rows"])
