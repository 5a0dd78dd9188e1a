"""Sampling with keyed noise that need not be stored: the interface, its reference and draws.c.

With a vocabulary of 150k entries the noise is as large as the logits. `TorchDraws`, the reference
implementation, stores it; on a CPU with a C compiler, and on a GPU, it is hashed where it is added.
"""

import abc
from collections.abc import Callable, Sequence
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longtail.sampling import Drawn, draw_rows, gumbel_noise, is_truncated
from longtail.system.device import to_device
from longtail.types import SamplingParams

_BLOCK = 128
"""Entries of a block of draws.c."""


class Draws(abc.ABC):
    """Noise g[key, position, v] of `sampling.gumbel_noise`, and sampling with it."""

    @abc.abstractmethod
    def noise(
        self,
        keys: Int[Tensor, "rows"],
        positions: Int[Tensor, "rows"],
        vocab_size: int,
        entries: Int[Tensor, "vocab"] | None = None,
    ) -> Float[Tensor, "rows vocab"]:
        """Return the noise (float32) of all entries, or of some."""

    @abc.abstractmethod
    def draw(
        self,
        logits: Float[Tensor, "rows vocab"],
        keys: Int[Tensor, "rows"],
        positions: Int[Tensor, "rows"],
        temperatures: Float[Tensor, "rows"],
    ) -> Drawn:
        """Sample one token per row, as `sampling.draw` without truncation; 0 is greedy."""

    def draw_rows(
        self,
        logits: Float[Tensor, "rows vocab"],
        keys: Sequence[int],
        positions: Sequence[int],
        params: Sequence[SamplingParams],
    ) -> Drawn:
        """Sample each row with its own parameters; noise is stored for truncated rows only."""
        device = logits.device
        numbers = to_device([keys, positions], device)
        temperatures = to_device([each.temperature for each in params], device)
        drawn = self.draw(logits, numbers[0], numbers[1], temperatures)
        cut = [row for row, each in enumerate(params) if each.temperature and is_truncated(each)]
        if cut:
            rows = to_device(cut, device)
            noise = self.noise(numbers[0, rows], numbers[1, rows], logits.shape[1])
            again = draw_rows(logits[rows], noise, [params[row] for row in cut])
            drawn.tokens[rows], drawn.logprobs[rows] = again.tokens, again.logprobs
        return drawn


class TorchDraws(Draws):
    """The reference implementation."""

    def noise(
        self,
        keys: Int[Tensor, "rows"],
        positions: Int[Tensor, "rows"],
        vocab_size: int,
        entries: Int[Tensor, "vocab"] | None = None,
    ) -> Float[Tensor, "rows vocab"]:
        """Return `sampling.gumbel_noise`."""
        return gumbel_noise(keys, positions, vocab_size, entries)

    def draw(
        self,
        logits: Float[Tensor, "rows vocab"],
        keys: Int[Tensor, "rows"],
        positions: Int[Tensor, "rows"],
        temperatures: Float[Tensor, "rows"],
    ) -> Drawn:
        """Add the noise to all logprobs and take the argmax."""
        warm = (temperatures > 0)[:, None]
        scores = logits if logits.dtype == torch.float64 else logits.float()
        scores = torch.where(warm, scores / temperatures[:, None].clamp(min=1e-30), scores)
        logprobs = scores.log_softmax(-1)
        noise = gumbel_noise(keys, positions, logits.shape[1])
        tokens = torch.where(warm, logprobs + noise, scores).argmax(-1)
        drawn = logprobs.gather(-1, tokens[:, None])[:, 0]
        return Drawn(tokens=tokens, logprobs=torch.where(warm[:, 0], drawn, 0.0 * drawn))


@final
class NativeDraws(TorchDraws):
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
            logits.data_ptr(), logits.stride(0), rows, vocab, numbers.data_ptr(),
            shares.data_ptr(), self._scratch.data_ptr(), room, tokens.data_ptr(),
            logprobs.data_ptr(), threads,
        )  # fmt: skip
        undecided = [row for row, token in enumerate(tokens.tolist()) if token < 0]
        if undecided:
            noise = gumbel_noise(numbers[0, undecided], numbers[1, undecided], vocab)
            again = draw_rows(logits[undecided], noise, [params[row] for row in undecided])
            tokens[undecided], logprobs[undecided] = again.tokens, again.logprobs
        return Drawn(tokens=tokens, logprobs=logprobs)
