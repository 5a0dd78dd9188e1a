"""Sampling with keyed noise in Triton: the noise is hashed where it is added, and never stored.

There are two passes over the logits: the first computes the normaliser of a row, the second the
maximum of `log p + g` and its log p. A row is cut into chunks, one per program. Of equal scores the
first entry wins, as in `sampling.draw`.

The hash is integer arithmetic, equal to the bit. g is -log(-log1p(-u)): log1p is
log(w) u / (1 - w) with w = 1 - u rounded (Goldberg 1991, theorem 4), and each log may differ by
units in the last place from PyTorch's: NOISE IS WITHIN 2e-6 OF THE REFERENCE'S where |g| < 4, and
within 4e-7 of |g| beyond. A token differs from the reference's only if two scores are that close.
"""

from typing import final, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from longtail.model.kernels.draws import Draws
from longtail.sampling import Drawn, row_keys

_CHUNK, _BLOCK = 8192, 1024


@triton.jit
@no_type_check
def _gumbel(low, high, entries):
    """Return Gumbel(0, 1) noise of vocabulary entries, as `sampling.gumbel_noise` does."""
    x = entries * -0x61C88647 + low
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x21F0AAAD + high
    x = (x ^ ((x >> 15) & 0x1FFFF)) * -0x2CA5D269
    x = (x ^ ((x >> 15) & 0x1FFFF)) & 0x7FFFFFFF
    u = tl.minimum((x.to(tl.float32) + 0.5) * 4.656612873077393e-10, 0.99999994039535522)
    w = 1.0 - u
    rest = tl.where(w == 1.0, 1.0, 1.0 - w)
    exponential = tl.where(w == 1.0, u, -tl.log(w) * u / rest)
    return -tl.log(exponential)


@triton.jit
@no_type_check
def _noise(lows, highs, out, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Store one block of one row's noise."""
    row = tl.program_id(0)
    entries = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    noise = _gumbel(tl.load(lows + row), tl.load(highs + row), entries)
    tl.store(out + row.to(tl.int64) * VOCAB + entries, noise, mask=entries < VOCAB)


@triton.jit
@no_type_check
def _normalise(logits, stride, temperatures, tops, sums, CHUNKS: tl.constexpr, VOCAB: tl.constexpr,
               CHUNK: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Store the maximum score of one chunk of one row, and the sum of exp(score - maximum)."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    temperature = tl.load(temperatures + row)
    heat = tl.where(temperature > 0, temperature, 1.0)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, VOCAB), BLOCK):
        entries = start + tl.arange(0, BLOCK)
        at = logits + row.to(tl.int64) * stride + entries
        score = tl.load(at, mask=entries < VOCAB, other=float("-inf")).to(tl.float32) / heat
        higher = tl.maximum(top, score)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(top - base) + tl.exp(score - base)
        top = higher
    highest = tl.max(top, 0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    tl.store(tops + row * CHUNKS + chunk, highest)
    tl.store(sums + row * CHUNKS + chunk, tl.sum(total * tl.exp(top - base), 0))


@triton.jit
@no_type_check
def _best(logits, stride, temperatures, lows, highs, tops, log_sums, scores, tokens, logprobs,
          CHUNKS: tl.constexpr, VOCAB: tl.constexpr, CHUNK: tl.constexpr,
          BLOCK: tl.constexpr):  # fmt: skip
    """Store the best entry of one chunk of one row: its score, index and log-probability."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    temperature = tl.load(temperatures + row)
    heat = tl.where(temperature > 0, temperature, 1.0)
    low, high = tl.load(lows + row), tl.load(highs + row)
    top, log_sum = tl.load(tops + row), tl.load(log_sums + row)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    where = tl.full([BLOCK], VOCAB, tl.int32)
    kept = tl.zeros([BLOCK], tl.float32)
    for start in range(chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, VOCAB), BLOCK):
        entries = start + tl.arange(0, BLOCK)
        at = logits + row.to(tl.int64) * stride + entries
        score = tl.load(at, mask=entries < VOCAB, other=float("-inf")).to(tl.float32) / heat
        logprob = score - top - log_sum
        noisy = tl.where(temperature > 0, logprob + _gumbel(low, high, entries), score)
        better = (entries < VOCAB) & (noisy > best)
        best = tl.where(better, noisy, best)
        where = tl.where(better, entries, where)
        kept = tl.where(better, logprob, kept)
    highest = tl.max(best, 0)
    token = tl.min(tl.where(best == highest, where, VOCAB), 0)
    mine = (where == token) & (best == highest)
    tl.store(scores + row * CHUNKS + chunk, highest)
    tl.store(tokens + row * CHUNKS + chunk, token)
    tl.store(logprobs + row * CHUNKS + chunk, tl.sum(tl.where(mine, kept, 0.0), 0))


@final
class TritonDraws(Draws):
    """Sampling from logits in float32, bfloat16 or float16; rows may be part of a wider tensor."""

    def noise(
        self,
        keys: Int[Tensor, "rows"],
        positions: Int[Tensor, "rows"],
        vocab_size: int,
        entries: Int[Tensor, "vocab"] | None = None,
    ) -> Float[Tensor, "rows vocab"]:
        """Return the noise; every entry is hashed once."""
        low, high = row_keys(keys, positions)
        out = torch.empty(len(keys), vocab_size, device=keys.device)
        _noise[len(keys), triton.cdiv(vocab_size, _BLOCK)](low, high, out, vocab_size, _BLOCK)
        return out if entries is None else out[:, entries]

    def draw(
        self,
        logits: Float[Tensor, "rows vocab"],
        keys: Int[Tensor, "rows"],
        positions: Int[Tensor, "rows"],
        temperatures: Float[Tensor, "rows"],
    ) -> Drawn:
        """Sample without waiting for the device. Logits that are not finite give a NaN logprob."""
        assert logits.stride(1) == 1, "entries of a row are contiguous"
        rows, vocab = logits.shape
        chunks = triton.cdiv(vocab, _CHUNK)
        sizes = (chunks, vocab, _CHUNK, _BLOCK)
        tops, sums, scores, logprobs = logits.new_empty(4, rows, chunks, dtype=torch.float32)
        tokens = torch.empty(rows, chunks, dtype=torch.int32, device=logits.device)
        stride = logits.stride(0)
        _normalise[rows, chunks](logits, stride, temperatures, tops, sums, *sizes)
        top = tops.amax(1)
        log_sum = (sums * (tops - top[:, None]).exp()).sum(1).log()
        _best[rows, chunks](
            logits, stride, temperatures, *row_keys(keys, positions), top, log_sum, scores, tokens,
            logprobs, *sizes,
        )  # fmt: skip
        first = (scores == scores.amax(1, keepdim=True)).int().argmax(1, keepdim=True)
        drawn = logprobs.gather(1, first)[:, 0]
        # A NaN sum must not become the logprob 0 of greedy decoding.
        greedy = (temperatures == 0) & log_sum.isfinite()
        return Drawn(
            tokens=tokens.gather(1, first)[:, 0].long().clamp(max=vocab - 1),
            logprobs=torch.where(greedy, 0.0, torch.where(log_sum.isfinite(), drawn, torch.nan)),
        )
