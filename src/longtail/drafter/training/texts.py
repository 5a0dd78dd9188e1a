"""Texts that a drafter learns: written by the target, kept as token ids, cut into batches.

A text is `rl.data.examples.Example`: tokens, of which those after the prompt are learned.
Completions that the target writes itself are the best ones, for they are what it will be asked to
write.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

from longtail.errors import CheckpointError, DataError
from longtail.rl.data.examples import Example
from longtail.rl.packing import pack
from longtail.sampling import noise_key
from longtail.system.strict_json import parse_json
from longtail.types import Completion, PackedSequences, Request, SamplingParams


def write_texts(
    generate: Callable[[Sequence[Request]], Sequence[Completion]],
    prompts: Sequence[tuple[int, ...]],
    sampling: SamplingParams,
    *,
    samples: int,
    seed: int,
) -> list[Example]:
    """Let an engine complete each prompt `samples` times; the texts of a prompt are neighbours."""
    requests = [
        Request(
            request_id=f"drafter/{index}#{sample}",
            prompt_tokens=tokens,
            noise_key=noise_key(seed, "drafter", index, sample),
            sampling=sampling,
            group_id=f"drafter/{index}" if samples > 1 else "",
        )
        for index, tokens in enumerate(prompts)
        for sample in range(samples)
    ]
    completions = generate(requests)
    return [
        Example(
            tokens=request.prompt_tokens + completion.tokens, prompt_len=len(request.prompt_tokens)
        )
        for request, completion in zip(requests, completions, strict=True)
    ]


def save_texts(path: Path, texts: Sequence[Example], origin: str) -> None:
    """Write texts as JSON lines of token ids, whole or not at all; the first line is `origin`."""
    rows = [{"origin": origin}, *({"prompt_len": t.prompt_len, "tokens": t.tokens} for t in texts)]
    temporary = path.with_name(f".new-{path.name}")
    try:
        temporary.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise CheckpointError(
            f"{path}: {error.strerror}; free some space, then start again"
        ) from error


def read_texts(path: Path, origin: str) -> list[Example] | None:
    """Read texts that `save_texts` wrote for the same origin; None where there are none."""
    if not path.is_file():
        return None
    try:
        first, *rows = map(parse_json, path.read_bytes().splitlines())
        if first["origin"] != origin:
            return None
        return [_text(row["tokens"], row["prompt_len"]) for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is damaged ({error!r}); remove it and start again") from error


def _text(tokens: list[int], prompt_len: int) -> Example:
    if not all(type(token) is int and token >= 0 for token in tokens):
        raise ValueError("tokens that are no numbers from 0")
    if type(prompt_len) is not int or not 1 <= prompt_len <= len(tokens):
        raise ValueError(f"a prompt of {prompt_len!r:.80} of {len(tokens)} tokens")
    return Example(tokens=tuple(tokens), prompt_len=prompt_len)


def pack_texts(texts: Sequence[Example], budget: int) -> list[PackedSequences]:
    """Lay texts end to end in micro-batches of at most `budget` tokens."""
    packs = pack([text.tokens for text in texts], [text.prompt_len for text in texts], budget)
    return [one.packed for one in packs]


@final
class TextBatches:
    """Cuts texts into batches of at most `batch_tokens` tokens, at least one text, without end.

    Each epoch has an order drawn from (seed, epoch), so the cursor is two numbers.
    """

    def __init__(self, texts: Sequence[Example], batch_tokens: int, seed: int) -> None:
        assert texts, "there is nothing to learn from"
        self._texts, self._budget, self._seed = texts, batch_tokens, seed
        content = repr([(text.prompt_len, text.tokens) for text in texts])
        self._fingerprint = hashlib.sha256(content.encode()).hexdigest()[:16]
        self._epoch = self._position = 0
        self._order = self._order_of(0)

    def take(self) -> tuple[Example, ...]:
        """Return the next batch, crossing into new epochs as needed."""
        batch: list[Example] = []
        room = self._budget
        while True:
            if self._position == len(self._texts):
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._order_of(self._epoch)
            text = self._texts[self._order[self._position]]
            room -= len(text.tokens)
            if batch and room < 0:
                return tuple(batch)
            batch.append(text)
            self._position += 1

    def state(self) -> dict[str, Any]:
        """Return the cursor, fit for JSON."""
        return {
            "fingerprint": self._fingerprint,
            "epoch": self._epoch,
            "position": self._position,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go to a saved cursor. Raises DataError where it belongs to other texts."""
        if state["fingerprint"] != self._fingerprint:
            raise DataError(
                "the checkpoint was made with other texts; restore the data of that run, or start "
                "anew in another run.dir"
            )
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = self._order_of(self._epoch)

    def _order_of(self, epoch: int) -> list[int]:
        def draw(index: int) -> bytes:
            return hashlib.blake2b(f"{self._seed}/{epoch}/{index}".encode(), digest_size=8).digest()

        return sorted(range(len(self._texts)), key=draw)
