"""Recent texts for the drafter to learn from: tokens alone, bounded, those half written included.

    add       texts as far as they are written; a longer version takes the place of a shorter
    begin     a new policy step: what was long in the step before stays, what is older goes
    batch     what to learn next
    heldout   what is never learned, to measure on

While a step is being written, what is finished is short: learned alone, it would teach a drafter to
expect ends. So the long texts of the step before are mixed in (one step off), and the stragglers'
texts are there as far as they are written. Features are not kept here: whoever learns has them, or
computes them.
"""

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter
from typing import Any, final

import torch
from jaxtyping import Int
from torch import Tensor

from longtail.errors import CheckpointError
from longtail.rl.data.examples import Example
from longtail.sampling import noise_key
from longtail.types import Completion, Request

_TOKEN_BYTES, _TEXT_BYTES = 4, 256
"""What a token takes, and what a text takes beside them."""
_HELDOUT_ONE_IN = 8
_SHORTEST = 3
"""A pair of the drafter, and the token that it predicts."""

Key = tuple[int, str]
"""A text: its policy step and its request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSnapshot:
    """A text as far as it is written.

    Example: TextSnapshot(request_id="train/17@0#3", tokens=(3, 9, 4, 7), prompt_len=2, step=5,
                     is_finished=False)
    """

    request_id: str
    """Of the form group#sample, or without siblings."""
    tokens: tuple[int, ...]
    """Prompt and what was generated."""
    prompt_len: int
    step: int
    """Policy step whose rollout it belongs to."""
    is_finished: bool

    @staticmethod
    def of(request: Request, completion: Completion, step: int) -> "TextSnapshot":
        """Join a completion to its prompt."""
        return TextSnapshot(
            request_id=request.request_id,
            tokens=(*request.prompt_tokens, *completion.tokens),
            prompt_len=len(request.prompt_tokens),
            step=step,
            is_finished=True,
        )


@dataclass(slots=True, kw_only=True)
class _Kept:
    tokens: Int[Tensor, "tokens"]
    prompt_len: int
    is_finished: bool
    is_heldout: bool
    drawn: int
    """The last pass in which it was drawn; they count from 1."""

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def num_bytes(self) -> int:
        return _bytes_of(len(self.tokens))


@final
class DrafterBuffer:
    """Texts of the present policy step, and the long ones of the step before.

    When a step begins, the texts of the one before stay if at least as many tokens were generated
    as in its median text, and all that are older go. That holds for what is learned and for what is
    held out, each for itself; where the step before has none, the older ones stay. Of an earlier
    step nothing is taken in any more but longer versions of what stayed.

    `num_bytes` never exceeds `max_bytes`: the oldest step's shortest texts go first. One text in
    eight is held out, with all its siblings, the same ones in every buffer. Whatever is drawn
    follows from `seed`, the texts and the number of draws.
    """

    def __init__(self, max_bytes: int, *, seed: int) -> None:
        self._max_bytes, self._seed = max_bytes, seed
        self._texts: dict[Key, _Kept] = {}
        """In the order in which they were last added to."""
        self._num_bytes = self._step = 0
        self._pass = 1
        self._undo: tuple[int, dict[Key, int]] = (1, {})

    @property
    def num_bytes(self) -> int:
        """Memory that the texts are counted with."""
        return self._num_bytes

    @property
    def num_texts(self) -> int:
        """Texts, those held out included."""
        return len(self._texts)

    @property
    def num_tokens(self) -> int:
        """Tokens of all texts, prompts included."""
        return sum(len(kept.tokens) for kept in self._texts.values())

    def begin(self, step: int) -> None:
        """Begin a policy step, unless it has begun."""
        if step <= self._step:
            return
        for is_heldout in (False, True):
            side = {key: t for key, t in self._texts.items() if t.is_heldout == is_heldout}
            lengths = [t.num_generated for key, t in side.items() if key[0] == self._step]
            median = statistics.median(lengths) if lengths else 0
            for key, text in side.items():
                if lengths and (key[0] < self._step or text.num_generated < median):
                    self._drop(key)
        self._step = step

    def add(self, texts: Iterable[TextSnapshot]) -> None:
        """Take in texts; one of a later step begins it, one with nothing generated is left out."""
        for text in texts:
            self.begin(text.step)
            key = (text.step, text.request_id)
            if self._is_news(key, text):
                known = self._drop(key)
                self._put(
                    key,
                    _Kept(
                        tokens=torch.tensor(text.tokens, dtype=torch.int32),
                        prompt_len=text.prompt_len,
                        is_finished=text.is_finished,
                        is_heldout=_is_heldout(text.request_id),
                        drawn=0 if known is None else known.drawn,
                    ),
                )
                self._evict()

    def batch(self, num_tokens: int, *, max_len: int | None = None) -> tuple[Example, ...]:
        """Draw texts to learn, at most `num_tokens` tokens; none if there are none.

        Every text is drawn once in a pass over the buffer; a batch crosses into the next pass, but
        holds no text twice. Of a text longer than `max_len` (`num_tokens` if not given) a window is
        taken, at most half of it prompt, somewhere.
        """
        longest, room = _longest(num_tokens, max_len), num_tokens
        batch: dict[Key, Example] = {}
        self._undo = (self._pass, {})
        for _ in range(2):
            for key in self._waiting(batch):
                kept = self._texts[key]
                example = _window(kept, self._start(key, kept, longest), longest)
                room -= len(example.tokens)
                if room < 0:
                    return tuple(batch.values())
                batch[key] = example
                self._undo[1][key] = kept.drawn
                kept.drawn = self._pass
            self._pass += 1
        return tuple(batch.values())

    def put_back(self) -> None:
        """Undo the last draw, which was not learned: the next batch is the same one again."""
        self._pass, marks = self._undo
        for key, drawn in marks.items():
            if key in self._texts:
                self._texts[key].drawn = drawn
        self._undo = (self._pass, {})

    def heldout(self, num_tokens: int, *, max_len: int | None = None) -> tuple[Example, ...]:
        """Return what was held out last, the newest text first, at most `num_tokens` tokens.

        Of a text longer than `max_len` (`num_tokens` if not given) the end is taken.
        """
        longest, room = _longest(num_tokens, max_len), num_tokens
        found: list[Example] = []
        mine = [(key[0], kept) for key, kept in self._texts.items() if kept.is_heldout]
        for _, kept in reversed(sorted(mine, key=itemgetter(0))):
            example = _window(kept, max(len(kept.tokens) - longest, 0), longest)
            room -= len(example.tokens)
            if room < 0:
                break
            found.append(example)
        return tuple(found)

    def snapshots(self) -> list[TextSnapshot]:
        """Copy all texts, of earlier steps first: as another buffer takes them in."""
        return [
            TextSnapshot(
                request_id=request_id,
                tokens=tuple(kept.tokens.tolist()),
                prompt_len=kept.prompt_len,
                step=step,
                is_finished=kept.is_finished,
            )
            for (step, request_id), kept in sorted(self._texts.items(), key=_step_of)
        ]

    def tensors(self) -> dict[str, Tensor]:
        """Copy all tokens, end to end."""
        empty = torch.empty(0, dtype=torch.int32)
        return {"tokens": torch.cat([empty, *(kept.tokens for kept in self._texts.values())])}

    def state(self) -> dict[str, Any]:
        """Return the rest, fit for JSON."""
        return {
            "step": self._step,
            "pass": self._pass,
            "texts": [
                {
                    "request_id": request_id,
                    "step": step,
                    "num_tokens": len(kept.tokens),
                    "prompt_len": kept.prompt_len,
                    "is_finished": kept.is_finished,
                    "drawn": kept.drawn,
                }
                for (step, request_id), kept in self._texts.items()
            ],
        }

    def restore(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Go on where `tensors` and `state` were taken; CheckpointError if they do not fit."""
        lengths = [text["num_tokens"] for text in state["texts"]]
        tokens = tensors["tokens"].to(torch.int32)
        if sum(lengths) != len(tokens):
            raise CheckpointError(
                f"the drafter's texts have {sum(lengths)} tokens, {len(tokens)} are there"
            )
        self._texts, self._num_bytes = {}, 0
        self._step, self._pass = state["step"], state["pass"]
        self._undo = (self._pass, {})
        for text, end in zip(state["texts"], accumulate(lengths), strict=True):
            kept = _Kept(
                tokens=tokens[end - text["num_tokens"] : end].clone(),
                prompt_len=text["prompt_len"],
                is_finished=text["is_finished"],
                is_heldout=_is_heldout(text["request_id"]),
                drawn=text["drawn"],
            )
            self._put((text["step"], text["request_id"]), kept)
        self._evict()

    def _is_news(self, key: Key, text: TextSnapshot) -> bool:
        """Tell whether a text says more than what is kept, and may be kept."""
        known, length = self._texts.get(key), len(text.tokens)
        if length <= text.prompt_len or _bytes_of(length) > self._max_bytes:
            return False
        if known is None:
            return text.step == self._step
        return length > len(known.tokens) or (
            length == len(known.tokens) and text.is_finished and not known.is_finished
        )

    def _put(self, key: Key, kept: _Kept) -> None:
        self._texts[key] = kept
        self._num_bytes += kept.num_bytes

    def _drop(self, key: Key) -> _Kept | None:
        kept = self._texts.pop(key, None)
        self._num_bytes -= 0 if kept is None else kept.num_bytes
        return kept

    def _evict(self) -> None:
        if self._num_bytes <= self._max_bytes:
            return
        for key in sorted(self._texts, key=lambda k: (k[0], self._texts[k].num_generated)):
            self._drop(key)
            if self._num_bytes <= self._max_bytes:
                return

    def _waiting(self, batch: Mapping[Key, Example]) -> list[Key]:
        """List what this pass has still to draw, in the pass's order."""
        waiting = [
            key
            for key, kept in self._texts.items()
            if not kept.is_heldout and kept.drawn < self._pass and key not in batch
        ]
        return sorted(waiting, key=lambda key: noise_key(self._seed, "order", self._pass, *key))

    def _start(self, key: Key, kept: _Kept, longest: int) -> int:
        """Draw where a window begins."""
        last = max(len(kept.tokens) - longest, 0)
        first = min(max(kept.prompt_len - longest // 2, 0), last)
        drawn = noise_key(self._seed, "window", self._pass, *key)
        return first + drawn % (last - first + 1)


def _step_of(item: tuple[Key, _Kept]) -> int:
    return item[0][0]


def _bytes_of(num_tokens: int) -> int:
    return _TOKEN_BYTES * num_tokens + _TEXT_BYTES


def _is_heldout(request_id: str) -> bool:
    """Decide by the group, so that siblings are never on both sides."""
    group = request_id.rpartition("#")[0] or request_id
    return noise_key(0, "heldout", group) % _HELDOUT_ONE_IN == 0


def _longest(num_tokens: int, max_len: int | None) -> int:
    longest = num_tokens if max_len is None else min(num_tokens, max_len)
    assert longest >= _SHORTEST, f"{longest} tokens predict nothing"
    return longest


def _window(kept: _Kept, start: int, longest: int) -> Example:
    """Cut `longest` tokens; no pair predicts the first two of a window, so they are its prompt."""
    shown = kept.prompt_len - start
    return Example(
        tokens=tuple(kept.tokens[start : start + longest].tolist()),
        prompt_len=max(shown, _SHORTEST - 1) if start else shown,
    )
