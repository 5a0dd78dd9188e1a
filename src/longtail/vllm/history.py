"""Drafts copied from a request's own sequence, its group's and recent ones, on the device.

    a request ends in ..       x b c
    sequences                  .. a b c d e ..,  .. x b c f g ..     running or finished
    the longest known end      x b c, three tokens: f g is copied

Sequences of one prompt share its hash, so the completions of a group find each other.
All of it is a handful of tensor operations; the host only gives each request a place.
"""

from collections.abc import Container, Sequence
from typing import NamedTuple, final

import torch
from jaxtyping import Bool, Int
from torch import Tensor

LONGEST = 8
"""Most tokens of an end that are compared."""
_MOST_SEQUENCES, _SEARCHED = 16, 1 << 23
"""Most sequences that are searched for a request, and most tokens of them for all requests."""
_SAME = 1 << 40
"""Rank of a sequence of the same prompt: its own goes first, then these, then others, newest first.

Copies alone, on 96 completions of gsm_symbolic (Qwen2.5-Coder-0.5B, groups of 8): accept length
1.79 from those of the same prompt, 1.88 with others.
"""
_MOST_BYTES = 64 << 20


def sent(numbers: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Copy numbers to a device; from pinned memory it does not wait for the work before it."""
    return torch.tensor(numbers, pin_memory=device.type == "cuda").to(device, non_blocking=True)


class Found(NamedTuple):
    """Continuations of the longest known end of each request."""

    tokens: Int[Tensor, "requests depth"]
    matched: Int[Tensor, "requests"]
    """Tokens of the end that were found, up to `LONGEST`; 0: nothing was."""
    counts: Bool[Tensor, "requests depth"]
    """Whether there is a token."""


@final
class SequenceTable:
    """Sequences in progress and the newest finished ones, each in a place of a table."""

    def __init__(self, max_running: int, max_len: int, device: torch.device) -> None:
        self.max_running, self.max_len = max_running, max_len
        size = max(
            max_running + _MOST_SEQUENCES, min(8 * max_running, _MOST_BYTES // (4 * max_len))
        )
        self.num_places = size + 1
        """The last one takes what is written for no request."""
        self._tokens = torch.zeros(size + 1, max_len, device=device, dtype=torch.int32)
        self._lengths = torch.zeros(size + 1, device=device, dtype=torch.int64)
        self._prompts = torch.full((size + 1,), -1, device=device)
        """Hash of each sequence's prompt."""
        weights = torch.randint(1 << 40, (max_len,), generator=torch.Generator().manual_seed(0))
        self._weights = weights.to(device)
        """Weights of a prompt's tokens in its hash; the sum may overflow."""
        self._begun = torch.zeros(size + 1, device=device, dtype=torch.int64)
        self._searched = self._begun.new_zeros(size + 1, min(_MOST_SEQUENCES, size))
        """Sequences that are searched for the request of each place, the first ones first."""
        self._num_begun, self._has_begun = 0, False
        self.width = 0
        """Most tokens that a sequence can have by now."""
        self._free = list(range(len(self._tokens) - 1))
        self._places: dict[str, int] = {}
        self._numbers: dict[str, int] = {}
        self._most = [0] * len(self._free)
        """Most tokens that each sequence can have, as far as the host knows."""

    def keep(self, running: Container[str], names: Sequence[str]) -> list[int]:
        """Free the places of all requests that are not in `running`; their sequences stay.

        Returns which of `names` have no place, and so are to `begin`.
        """
        for name in [each for each in self._places if each not in running]:
            self._free.append(self._places.pop(name))
            del self._numbers[name]
        return [index for index, name in enumerate(names) if name not in self._places]

    def begin(self, name: str, tokens: Int[Tensor, "tokens"], prompt_len: int) -> None:
        """Give a request the place of the sequence that ended first."""
        place = self._places[name] = self._free.pop(0)
        self._num_begun += 1
        self._numbers[name] = self._num_begun
        self._tokens[place, : len(tokens)] = tokens
        self._lengths[place] = len(tokens)
        self._prompts[place] = ((tokens[:prompt_len] + 1) * self._weights[:prompt_len]).sum()
        self._begun[place] = self._num_begun
        self._most[place] = len(tokens)
        self._has_begun = True

    def given(
        self, names: Sequence[str], prompt_lens: Sequence[int], lengths: Sequence[int]
    ) -> list[list[int]]:
        """Return, for each request, a number that no other one ever has, its place, its prompt.

        No sequence has more tokens by now than `lengths`.
        """
        if self._has_begun:  # the sequences to search are others
            self._has_begun = False
            at = sent([*self._places.values()], self._begun.device)
            is_same = self._prompts[None, :-1] == self._prompts[at][:, None]
            rank = self._begun[:-1] + is_same * _SAME
            rank.scatter_(1, at[:, None], 2 * _SAME)
            self._searched[at] = rank.topk(self._searched.shape[1], 1).indices
        places = [self._places[each] for each in names]
        for place, length in zip(places, lengths, strict=True):
            self._most[place] = min(length, self.max_len)
        self.width = max(self._most)
        return [[self._numbers[each] for each in names], places, list(prompt_lens)]

    def write(
        self,
        places: Int[Tensor, "requests"],
        positions: Int[Tensor, "requests tokens"],
        tokens: Int[Tensor, "requests tokens"],
        counts: Bool[Tensor, "requests tokens"],
    ) -> None:
        """Write new tokens; those that do not count go to no sequence."""
        rows = torch.where(counts, places[:, None], -1)
        self._tokens[rows, positions] = tokens.to(torch.int32)
        ends = torch.where(counts, positions + 1, 0).amax(1)
        self._lengths[places] = torch.maximum(self._lengths[places], ends)

    def find(self, places: Int[Tensor, "requests"], depth: int, width: int) -> Found:
        """Return what follows the longest known end of each request, in sequences up to `width`."""
        most = max(_SEARCHED // (len(places) * width), 1)
        searched = self._searched[places][:, :most]
        most = searched.shape[1]
        sequences, lengths = self._tokens[searched, :width], self._lengths[searched]
        at = torch.arange(max(width, LONGEST), device=places.device)
        ends, at = self._lengths[places][:, None] - 1 - at[:LONGEST], at[:width]
        # Before its first token there is none, which equals no other one.
        ends = torch.where(ends < 0, -2, self._tokens[places[:, None], ends.clamp(min=0)])
        before = torch.nn.functional.pad(sequences, (LONGEST - 1, 0), value=-1)
        matches = at < lengths[..., None] - 1
        score = torch.zeros_like(matches, dtype=torch.uint8)
        for back in range(LONGEST):
            first = LONGEST - 1 - back
            matches &= before[..., first : first + width] == ends[:, back, None, None]
            score += matches
        # Of equal matches the first sequence's last one is copied.
        order = torch.arange(most, 0, -1, device=places.device)[:, None] * width + at
        step = (most + 1) * width
        best = (score.int() * step + order.int()).amax((1, 2)).long()
        matched, best = best // step, best % step
        chosen = searched.gather(1, most - best[:, None] // width)[:, 0]
        following = best[:, None] % width + 1 + torch.arange(depth, device=places.device)
        counts = (following < self._lengths[chosen][:, None]) & (matched > 0)[:, None]
        tokens = self._tokens[chosen[:, None], following.clamp(max=self.max_len - 1)]
        return Found(tokens=tokens.long(), matched=matched, counts=counts)

    def after(
        self, places: Int[Tensor, "requests"], positions: Int[Tensor, "requests"], depth: int
    ) -> tuple[Int[Tensor, "requests depth"], Bool[Tensor, "requests depth"]]:
        """Return the tokens that were written after these positions, and whether they were."""
        at = positions[:, None] + 1 + torch.arange(depth, device=places.device)
        counts = at < self._lengths[places][:, None]
        at = at.clamp(max=self.max_len - 1)
        return self._tokens[places[:, None], at].long(), counts
