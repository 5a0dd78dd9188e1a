"""A bounded buffer of recent sequences for drafter training, unfinished ones included.

    add       sequences as far as they are generated; a longer version replaces a shorter one
    begin     a new policy step: long sequences of the previous step stay, older ones are dropped
    batch     the sequences to train on next
    heldout   sequences that are never trained, for measurements

During a rollout the finished sequences are the short ones; a drafter trained on them alone would
predict ends too early. The buffer holds token ids only; features come from an engine or the target.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Int
from torch import Tensor

from longtail.rl.data.examples import Example
from longtail.sampling import noise_key
from longtail.types import Completion, Request

_TOKEN_BYTES, _SEQUENCE_BYTES = 4, 256
"""Bytes of a token, and of a sequence's other data."""
_HELDOUT_ONE_IN = 8
_MIN_LEN = 3
"""Tokens of a pair and of its prediction."""

Key = tuple[int, str]
"""Policy step and request id of a sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSnapshot:
    """A sequence as far as it is generated."""

    request_id: str
    """Request id, group#sample if it has siblings."""
    tokens: tuple[int, ...]
    """Prompt and generated tokens."""
    prompt_len: int
    step: int
    """Policy step of the rollout."""

    @staticmethod
    def of(request: Request, completion: Completion, step: int) -> "SequenceSnapshot":
        """Return the finished sequence of a request."""
        episode = completion.episode
        prompt = request.prompt_tokens if episode is None else episode.prompt_tokens
        return SequenceSnapshot(
            request_id=request.request_id,
            tokens=(*prompt, *completion.tokens),
            prompt_len=len(prompt),
            step=step,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceWindow(Example):
    """The part of a sequence that is trained on or measured."""

    sequence: Example
    """The whole sequence."""
    start: int
    """Place of the first token in it."""


@dataclass(slots=True, kw_only=True)
class _Kept:
    tokens: Int[Tensor, "tokens"]
    prompt_len: int
    is_heldout: bool
    drawn: int
    """Number of the last pass in which it was drawn, from 1; 0: none."""
    number: int
    """Number of its addition."""
    is_preferred: bool = False

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.prompt_len


@final
class DrafterBuffer:
    """Sequences of the present policy step, and the long sequences of the previous one.

    When a step begins, one of the previous step stays if its completion is at least of median
    length, and older ones are dropped; training and held-out sequences separately. If the previous
    step has none, older ones stay. Later, an earlier step accepts only longer versions of its own.

    `num_bytes` never exceeds `max_bytes`: the oldest step's shortest ones are dropped first. One
    group in eight is held out, the same in every buffer. Draws are determined by `seed`, sequences
    and the number of draws.
    """

    def __init__(self, max_bytes: int, *, seed: int) -> None:
        self._max_bytes, self._seed = max_bytes, seed
        self._sequences: dict[Key, _Kept] = {}
        """In the order of their last additions."""
        self._step, self._pass = 0, 1
        self.num_bytes = 0
        """Accounted bytes of all sequences."""
        self.num_added = 0
        """Number of additions; each version of a sequence is one."""

    @property
    def num_sequences(self) -> int:
        """Number of sequences, held-out ones included."""
        return len(self._sequences)

    def begin(self, step: int) -> None:
        """Begin a policy step; no effect if it has begun."""
        if step <= self._step:
            return
        for is_heldout in (False, True):
            side = {key: t for key, t in self._sequences.items() if t.is_heldout == is_heldout}
            lengths = [t.num_generated for key, t in side.items() if key[0] == self._step]
            median = statistics.median(lengths) if lengths else 0
            for key, sequence in side.items():
                if lengths and (key[0] < self._step or sequence.num_generated < median):
                    self._drop(key)
        self._step = step

    def add(self, sequences: Iterable[SequenceSnapshot]) -> None:
        """Add sequences; one of a later step begins it, one without a completion is ignored."""
        for sequence in sequences:
            self.begin(sequence.step)
            key = (sequence.step, sequence.request_id)
            if self._is_new(key, sequence):
                known = self._drop(key)
                self.num_added += 1
                self._sequences[key] = _Kept(
                    tokens=torch.tensor(sequence.tokens, dtype=torch.int32),
                    prompt_len=sequence.prompt_len,
                    is_heldout=_is_heldout(sequence.request_id),
                    drawn=0 if known is None else known.drawn,
                    number=self.num_added,
                )
                self.num_bytes += _bytes_of(len(sequence.tokens))
                while self.num_bytes > self._max_bytes:
                    held = self._sequences
                    oldest = min(held, key=lambda k: (k[0], held[k].num_generated))
                    self._drop(oldest)

    def prefer(self, is_preferred: Callable[[Sequence[int]], bool]) -> None:
        """Draw the sequences first for whose tokens `is_preferred` is true now."""
        for kept in self._sequences.values():
            kept.is_preferred = is_preferred(kept.tokens.tolist())

    def batch(self, num_tokens: int, *, max_len: int | None = None) -> tuple[SequenceWindow, ...]:
        """Draw training sequences of at most `num_tokens` tokens in all; empty if there are none.

        A pass over the buffer draws each sequence once, preferred ones first; a batch may span two
        passes but holds none twice. A sequence longer than `max_len` (default `num_tokens`) is cut
        to a random window of which at most half is prompt.
        """
        longest, room = _longest(num_tokens, max_len), num_tokens
        batch: dict[Key, SequenceWindow] = {}
        for _ in range(2):
            for key in self._undrawn(batch):
                kept = self._sequences[key]
                example = _window(kept, self._start(key, kept, longest), longest)
                room -= len(example.tokens)
                if room < 0:
                    return tuple(batch.values())
                batch[key] = example
                kept.drawn = self._pass
            self._pass += 1
        return tuple(batch.values())

    def heldout(self, num_tokens: int, *, max_len: int | None = None) -> tuple[SequenceWindow, ...]:
        """Return held-out sequences of at most `num_tokens` tokens in all.

        Preferred ones come first, and of equals the newest. A sequence longer than
        `max_len` (default `num_tokens`) is cut to its end.
        """
        longest, room = _longest(num_tokens, max_len), num_tokens
        found: list[SequenceWindow] = []
        heldout = [item for item in self._sequences.items() if item[1].is_heldout]
        heldout.sort(key=lambda item: (item[1].is_preferred, _step_of(item)))
        for _, kept in reversed(heldout):
            example = _window(kept, max(len(kept.tokens) - longest, 0), longest)
            room -= len(example.tokens)
            if room < 0:
                break
            found.append(example)
        return tuple(found)

    def snapshots(self, since: int = 0) -> list[SequenceSnapshot]:
        """Copy the sequences after the first `since` additions, for another buffer's `add`.

        Sequences of earlier steps come first.
        """
        return [
            SequenceSnapshot(
                request_id=request_id,
                tokens=tuple(kept.tokens.tolist()),
                prompt_len=kept.prompt_len,
                step=step,
            )
            for (step, request_id), kept in sorted(self._sequences.items(), key=_step_of)
            if kept.number > since
        ]

    def _is_new(self, key: Key, sequence: SequenceSnapshot) -> bool:
        """Return whether a sequence may be kept and is longer than its kept version."""
        known, length = self._sequences.get(key), len(sequence.tokens)
        if length <= sequence.prompt_len or _bytes_of(length) > self._max_bytes:
            return False
        return sequence.step == self._step if known is None else length > len(known.tokens)

    def _drop(self, key: Key) -> _Kept | None:
        kept = self._sequences.pop(key, None)
        self.num_bytes -= 0 if kept is None else _bytes_of(len(kept.tokens))
        return kept

    def _undrawn(self, batch: Mapping[Key, SequenceWindow]) -> list[Key]:
        """Return the sequences that this pass has not drawn, in its order."""
        undrawn = [
            key
            for key, kept in self._sequences.items()
            if not kept.is_heldout and kept.drawn < self._pass and key not in batch
        ]

        def order(key: Key) -> tuple[bool, int]:
            drawn = noise_key(self._seed, "order", self._pass, *key)
            return not self._sequences[key].is_preferred, drawn

        return sorted(undrawn, key=order)

    def _start(self, key: Key, kept: _Kept, longest: int) -> int:
        """Draw the first token of a window."""
        last = max(len(kept.tokens) - longest, 0)
        first = min(max(kept.prompt_len - longest // 2, 0), last)
        drawn = noise_key(self._seed, "window", self._pass, *key)
        return first + drawn % (last - first + 1)


def _step_of(item: tuple[Key, _Kept]) -> int:
    return item[0][0]


def _bytes_of(num_tokens: int) -> int:
    return _TOKEN_BYTES * num_tokens + _SEQUENCE_BYTES


def _is_heldout(request_id: str) -> bool:
    """Decide by the group, so that siblings are held out together."""
    group = request_id.rpartition("#")[0] or request_id
    return noise_key(0, "heldout", group) % _HELDOUT_ONE_IN == 0


def _longest(num_tokens: int, max_len: int | None) -> int:
    longest = num_tokens if max_len is None else min(num_tokens, max_len)
    assert longest >= _MIN_LEN, f"{longest} tokens predict nothing"
    return longest


def _window(kept: _Kept, start: int, longest: int) -> SequenceWindow:
    """Cut `longest` tokens; the first two of a window are prompt, since no pair predicts them."""
    prompt_len, tokens = kept.prompt_len - start, tuple(kept.tokens.tolist())
    return SequenceWindow(
        tokens=tokens[start : start + longest],
        prompt_len=max(prompt_len, _MIN_LEN - 1) if start else prompt_len,
        sequence=Example(tokens=tokens, prompt_len=kept.prompt_len),
        start=start,
    )
