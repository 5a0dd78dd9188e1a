"""Draws and verification with keyed noise, on tensors as vLLM's V1 model runner holds them.

    drawn[row] = argmax_v (log p(v) + g[key, position, v])      the noise of longtail.sampling
    drafts     4 9 9 | 7
    drawn      4 9 2 | 7      bonus 5 | 8
    emitted    4 9 2 . | 7 8              -1 in place of the points

A draft stands while it equals the token drawn at its position, so a text does not depend on the
drafts. With longtail's keys as seeds vLLM draws from the very noise that longtail draws from.
"""

import hashlib
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from longtail.sampling import gumbel_noise

REJECTED = -1
"""Token in place of rejected drafts, as vLLM expects it."""
GREEDY_BELOW = 1e-5
"""Temperature below which vLLM decodes greedily."""


def request_key(name: str, seed: int | None) -> int:
    """Return the noise key of a request: its seed, else a hash of its id."""
    if seed is not None:
        return seed
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def draw(
    scaled_logits: Float[Tensor, "rows vocab"],
    keys: Int[Tensor, "rows"],
    positions: Int[Tensor, "rows"],
) -> Int[Tensor, "rows"]:
    """Draw one token per row; the logits are divided by the temperature and truncated already."""
    logprobs = scaled_logits.float().log_softmax(-1)
    return (logprobs + gumbel_noise(keys, positions, logprobs.shape[-1])).argmax(-1)


def draw_drafts(
    logits: Float[Tensor, "rows draft"],
    temperature: Float[Tensor, "rows"],
    keys: Int[Tensor, "rows"],
    positions: Int[Tensor, "rows"],
    entries: Int[Tensor, "draft"],
) -> Int[Tensor, "rows"]:
    """Draw drafts with the noise that the target will draw with, among the tokens `entries`."""
    logits, scale = logits.float(), temperature[:, None]
    noise = gumbel_noise(keys, positions, len(entries), entries)
    scores = logits / scale.clamp(min=GREEDY_BELOW) + noise
    return entries[torch.where(scale < GREEDY_BELOW, logits, scores).argmax(-1)]


def match(
    drawn: Int[Tensor, "drafts"],
    drafts: Int[Tensor, "drafts"],
    num_drafts: Sequence[int],
    bonus: Int[Tensor, "requests 1"],
    depth: int,
) -> Int[Tensor, "requests columns"]:
    """Return the tokens of each request: drawn ones up to the first draft that differs.

    `bonus` follows if all drafts stand. There are `depth` + 1 columns.
    """
    if not len(drawn):
        return bonus.to(torch.int32)
    counts = torch.tensor(num_drafts, device=drawn.device)
    column = torch.arange(depth + 1, device=drawn.device)
    rows = ((counts.cumsum(0) - counts)[:, None] + column).clamp(max=len(drawn) - 1)
    is_draft = column < counts[:, None]
    stands = is_draft & (drawn == drafts)[rows]
    num_standing = stands.int().cumprod(1).sum(1, keepdim=True)
    tokens = torch.where(is_draft, drawn[rows], bonus.to(drawn.dtype))
    return torch.where(column <= num_standing, tokens, REJECTED).to(torch.int32)
