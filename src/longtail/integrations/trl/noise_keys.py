"""Seeds of sampling (noise keys) for TRL: one for each sample of a batch, kept over its turns.

    first turn    prompt                                key = (seed, prompt, step, sample)
    later turns   prompt, completion, tool result       the key of its first turn

TRL calls its generator once for each turn, with the samples that are not done. Noise is drawn by
key and position, so a later turn continues the noise of the turn before it. `sample` is the place
in the batch of all processes; so a completion does not depend on their number.
"""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

from longtail.sampling import noise_key

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One sample of a batch, in one turn."""

    number: int
    """Place in the batch of all processes."""
    key: int
    group: str
    """Name of the prompt and the batch; samples with the same one share the prompt's KV."""
    prompt: Tokens

    @property
    def request_id(self) -> str:
        """Name of the sample's request in this turn."""
        return f"{self.group}#{self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Origin of a batch."""

    seed: int
    step: int
    """Number of the trainer's updates so far."""
    is_training: bool
    first: int
    """Place of this process's first sample in the batch of all processes."""


@final
class Turns:
    """Remembers the sequences of the present batch, to find the key of a later turn."""

    def __init__(self) -> None:
        self._sequences: dict[Tokens, list[Sample]] = {}
        self._step: tuple[int, bool] | None = None
        self._round = 0
        """Number of batches before this one between two updates."""

    def begin(self, prompts: Sequence[Tokens], batch: Batch) -> tuple[list[Sample], bool]:
        """Return the samples of a call, and whether it is the first turn of a batch.

        All of a later turn extend sequences of this batch.
        """
        step = (batch.step, batch.is_training)
        if step != self._step:
            self._step, self._round = step, 0
            self._sequences.clear()
        later = self._later(prompts) if self._sequences else None
        if later is not None:
            return later, False
        self._round += bool(self._sequences)
        self._sequences.clear()
        numbered = enumerate(prompts, start=batch.first)
        return [self._sample(prompt, batch, number) for number, prompt in numbered], True

    def end(self, samples: Sequence[Sample], completions: Sequence[Tokens]) -> None:
        """Remember the sequences that a later turn may extend, but for their last token."""
        for sample, tokens in zip(samples, completions, strict=True):
            self._sequences.setdefault((*sample.prompt, *tokens[:-1]), []).append(sample)

    def _sample(self, prompt: Tokens, batch: Batch, number: int) -> Sample:
        name = _digest(prompt)
        kind = "train" if batch.is_training else "eval"
        key = noise_key(batch.seed, "trl", kind, name, batch.step, self._round, number)
        group = f"{name}@{kind}{batch.step}.{self._round}"
        return Sample(number=number, key=key, group=group, prompt=prompt)

    def _later(self, prompts: Sequence[Tokens]) -> list[Sample] | None:
        """Return the samples that these prompts continue; None if one continues none."""
        lengths = sorted({len(known) for known in self._sequences}, reverse=True)
        found = []
        taken: dict[Tokens, int] = {}
        for prompt in prompts:
            begun = next((t for n in lengths if (t := prompt[:n]) in self._sequences), None)
            if begun is None or len(begun) == len(prompt):
                return None
            before, count = self._sequences[begun], taken.get(begun, 0)
            taken[begun] = count + 1
            earlier = before[min(count, len(before) - 1)]
            group = f"{earlier.group}/{_digest(prompt)}"
            found.append(replace(earlier, group=group, prompt=prompt))
        return found


def _digest(tokens: Tokens) -> str:
    return hashlib.blake2b(array("q", tokens).tobytes(), digest_size=8).hexdigest()
