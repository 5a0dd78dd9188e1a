"""Keyed sampling: a token is a function of (weights, context, key) alone.

For a request with key r, absolute position t and vocabulary entry v let g[r, t, v] be a
Gumbel(0, 1) variate from a counter-based generator. The token at position t is

    x_t = argmax_v ( log p(v | context) + g[r, t, v] )          temperature 0: argmax_v log p(v)

where p is the sampled distribution, after temperature and truncation. By the Gumbel-max theorem
(Gumbel 1954; Maddison, Tarlow and Minka 2014, equation 4; hypothesis: the g are independent over v)
x_t is an exact sample of p. Nothing else is random, so the text does not depend on the batch, the
schedule, the worker or the speculation. This module has no state and no global generator.
"""

import hashlib
from collections.abc import Callable, Sequence
from ctypes import c_float
from dataclasses import dataclass
from math import log, log1p

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from longtail.types import SamplingParams

_WORD = 2**64 - 1


def noise_key(seed: int, *parts: str | int) -> int:
    """Return the 64-bit (signed) key of one noise stream, equal on every machine.

    Example: noise_key(run_seed, "train/17", epoch, sample_index)
    """
    text = "\x1f".join(str(part) for part in (seed, *parts))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def completion_key(seed: int, index: int) -> int:
    """Return the noise key of the index-th completion of a prompt.

    One rule for everyone who writes: `longtail serve` answers a seed with the text that
    `longtail generate` writes for it.
    """
    return noise_key(seed, "generate", index)


def _shifted(x: Tensor, bits: int, width: int) -> Tensor:
    """Shift right logically; torch shifts signed integers arithmetically."""
    return (x >> bits).bitwise_and_((1 << (width - bits)) - 1)


def _mix64(x: Int[Tensor, "rows"]) -> Int[Tensor, "rows"]:
    """Apply the finaliser of SplitMix64 (Steele, Lea and Flood 2014); int64 products wrap."""
    x = (x ^ _shifted(x, 30, 64)) * -0x40A7B892E31B1A47
    x = (x ^ _shifted(x, 27, 64)) * -0x6B2FB644ECCEEE15
    return x ^ _shifted(x, 31, 64)


def row_keys(
    keys: Int[Tensor, "rows"], positions: Int[Tensor, "rows"]
) -> tuple[Int[Tensor, "rows"], Int[Tensor, "rows"]]:
    """Return the lower and the upper half of each row's 64-bit key (int32)."""
    row = _mix64(_mix64(keys + 0x1F83D9ABFB41BD6B) + positions * -0x61C8864680B583EB)
    return row.to(torch.int32), (row >> 32).to(torch.int32)


def gumbel_noise(
    keys: Int[Tensor, "rows"],
    positions: Int[Tensor, "rows"],
    vocab_size: int,
    entries: Int[Tensor, "vocab"] | None = None,
) -> Float[Tensor, "rows vocab"]:
    """Return Gumbel(0, 1) variates g[key, position, v] of all or some entries v (float32).

    The generator is counter-based: entry v of a row is a hash of v under a 64-bit row key, a 32-bit
    permutation with two multiplications (16 21f0aaad 15 d35a2d97 15, one of the least biased in
    hash-prospector's list). Half of the row key is added before each multiplication. E = -log1p(-u)
    has full relative precision for small exponentials, which win the argmax. u has 31 bits, so
    events of probability below 5e-10 are not resolved.
    """
    low, high = row_keys(keys, positions)
    if entries is None:
        entries = torch.arange(vocab_size, device=keys.device)
    x = (entries.to(torch.int32) * -0x61C88647) + low[:, None]
    x.bitwise_xor_(_shifted(x, 16, 32)).mul_(0x21F0AAAD).add_(high[:, None])
    x.bitwise_xor_(_shifted(x, 15, 32)).mul_(-0x2CA5D269)
    x.bitwise_xor_(_shifted(x, 15, 32)).bitwise_and_(0x7FFFFFFF)
    uniform = x.to(torch.float32).add_(0.5).mul_(2.0**-31).clamp_(max=1.0 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def entry_noise(key: int, position: int) -> Callable[[int], float]:
    """Return the noise of single entries: `gumbel_noise`, up to the rounding of its logs."""
    row = (key + 0x1F83D9ABFB41BD6B) & _WORD
    for added in (position * 0x9E3779B97F4A7C15, 0):
        row = ((row ^ row >> 30) * 0xBF58476D1CE4E5B9) & _WORD
        row = ((row ^ row >> 27) * 0x94D049BB133111EB) & _WORD
        row = ((row ^ row >> 31) + added) & _WORD
    low, high = row & 0xFFFFFFFF, row >> 32

    def noise(entry: int) -> float:
        x = (entry * 0x9E3779B9 + low) & 0xFFFFFFFF
        x = ((x ^ x >> 16) * 0x21F0AAAD + high) & 0xFFFFFFFF
        x = (x ^ x >> 15) * 0xD35A2D97 & 0xFFFFFFFF
        x = (x ^ x >> 15) & 0x7FFFFFFF
        u = c_float(c_float(x).value + 0.5).value * 2.0**-31  # rounded to float32, as there
        return -log(-log1p(-min(u, 1.0 - 2.0**-24)))

    return noise


def _keep(
    logprobs: Float[Tensor, "rows vocab"], params: SamplingParams
) -> Bool[Tensor, "rows vocab"]:
    """Return a mask of the entries that top_k, then top_p, then min_p keep.

    The sort is stable, so exactly top_k entries survive a tie. top_p keeps the smallest set whose
    probability reaches top_p (Holtzman et al. 2020), min_p the entries at least min_p times as
    probable as the best (Nguyen et al. 2024). The best entry is always kept.
    """
    ranked, order = torch.sort(logprobs, dim=-1, descending=True, stable=True)
    keep = torch.ones_like(ranked, dtype=torch.bool)
    if 0 < params.top_k < keep.shape[-1]:
        keep[:, params.top_k :] = False
    if params.top_p < 1.0:
        probs = ranked.exp() * keep
        before = probs.cumsum(-1) - probs
        keep &= before < params.top_p * probs.sum(-1, keepdim=True)
    if params.min_p > 0.0:
        keep &= ranked.exp() >= params.min_p * ranked[:, :1].exp()
    keep[:, 0] = True
    return torch.zeros_like(keep).scatter(-1, order, keep)


def log_distribution(
    logits: Float[Tensor, "rows vocab"], params: SamplingParams
) -> Float[Tensor, "rows vocab"]:
    """Return the log-probabilities of the distribution of `params`; -inf where truncated.

    Differentiable in the logits, with the set of kept entries constant. bfloat16 is computed in
    float32. Temperature 0 gives the point mass on the argmax. Logits with NaN or +inf give NaN.
    """
    scores = logits if logits.dtype == torch.float64 else logits.float()
    if params.temperature == 0.0:
        best, where = scores.detach().max(-1, keepdim=True)
        return torch.full_like(scores, float("-inf")).scatter(-1, where, best - best)
    if params.temperature != 1.0:
        scores = scores / params.temperature
    logprobs = scores.log_softmax(-1)
    if not is_truncated(params):
        return logprobs
    kept = scores.masked_fill(~_keep(logprobs.detach(), params), float("-inf"))
    return kept.log_softmax(-1)


def is_truncated(params: SamplingParams) -> bool:
    """Return whether truncation may give entries probability 0."""
    return bool(params.top_k) or params.top_p < 1.0 or params.min_p > 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """One token per row, and its log-probability under the sampled distribution."""

    tokens: Int[Tensor, "rows"]
    logprobs: Float[Tensor, "rows"]


def draw(
    logits: Float[Tensor, "rows vocab"],
    noise: Float[Tensor, "rows vocab"],
    params: SamplingParams,
) -> Drawn:
    """Sample all rows by Gumbel-max with the same parameters; greedy rows ignore the noise."""
    logprobs = log_distribution(logits, params)
    scores = logprobs if params.temperature == 0.0 else logprobs + noise
    tokens = scores.argmax(-1)
    return Drawn(tokens=tokens, logprobs=logprobs.gather(-1, tokens[:, None])[:, 0])


def draw_rows(
    logits: Float[Tensor, "rows vocab"],
    noise: Float[Tensor, "rows vocab"],
    params: Sequence[SamplingParams],
) -> Drawn:
    """Sample each row with its own parameters: one `draw` per distinct distribution."""
    if all(each is params[0] for each in params):
        return draw(logits, noise, params[0])
    members: dict[tuple[float, int, float, float], list[int]] = {}
    for row, each in enumerate(params):
        distribution = (each.temperature, each.top_k, each.top_p, each.min_p)
        members.setdefault(distribution, []).append(row)
    if len(members) == 1:
        return draw(logits, noise, params[0])
    tokens = torch.empty(len(params), dtype=torch.int64, device=logits.device)
    working = torch.float64 if logits.dtype == torch.float64 else torch.float32
    logprobs = torch.empty(len(params), dtype=working, device=logits.device)
    for listed in members.values():
        rows = torch.tensor(listed, device=logits.device)
        drawn = draw(logits[rows], noise[rows], params[listed[0]])
        tokens[rows], logprobs[rows] = drawn.tokens, drawn.logprobs
    return Drawn(tokens=tokens, logprobs=logprobs)
