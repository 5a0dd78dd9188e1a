"""The feature store: the target's features of generated texts, for drafter training.

    step --pending--spans--> one row for each token of a text --find(tokens)--> its rows

A feature depends on the weights and the tokens so far. So a text is found by its tokens: requests
share the rows of a beginning, like its KV, and a text of another worker is missing. All features
are dropped when the weights change.

Workers that finish last rarely train, so storing must be nearly free: a step only appends to the
pending steps, with rejected nodes, until a text is requested or the pending steps are large.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from longtail.engine.request import PREFIX_BLOCK, ActiveRequest
from longtail.engine.speculation.queue import Computed, TokenSpan
from longtail.speculation.drafter import Taps

_PENDING_PARTS = 4
"""Fraction 1/4 of the memory is for pending steps."""

_Tokens = tuple[int, ...]


@dataclass(slots=True, eq=False)
class _Text:
    """Rows of a request's tokens from `start` on: from 0, or from the end of shared KV."""

    active: ActiveRequest
    start: int
    slots: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.start + len(self.slots)

    def slots_from(self, at: int, tokens: Sequence[int]) -> list[int]:
        """Return the known rows of `tokens` from `at` on; the prompt is the same."""
        prompt_len, end = self.active.prompt_len, min(self.end, len(tokens))
        if self.active.tokens[prompt_len:end] != tokens[prompt_len:end]:
            end = min(end, prompt_len)
        return self.slots[at - self.start : end - self.start] if self.start <= at < end else []


@final
class FeatureStore:
    """Features of the latest texts, in at most `max_bytes`.

    The least recently extended request is dropped first, as a whole: finished before running ones.
    A recomputed request keeps its rows.
    """

    def __init__(self, taps: Taps, max_bytes: int) -> None:
        assert taps.any, "features need taps"
        self.taps = taps
        self._max_pending = max_bytes // _PENDING_PARTS
        self._max_kept = max_bytes - self._max_pending
        self._pending: list[Computed] = []
        self._num_pending = 0
        """Bytes of the pending steps."""
        self._rows: Tensor | None = None
        """Allocated with the shape and dtype of the first step; touched only where written."""
        self._free: list[int] = []
        self._texts: dict[ActiveRequest, _Text] = {}
        """In the order of their last extension."""
        self._groups: dict[_Tokens, list[_Text]] = {}
        """Texts by prompt."""
        self._whole: dict[_Tokens, list[_Text]] = {}
        """Texts from 0 on, by their first tokens."""

    @property
    def num_bytes(self) -> int:
        """Bytes of pending steps and of used rows."""
        if self._rows is None:
            return self._num_pending
        return self._num_pending + (len(self._rows) - len(self._free)) * _row_bytes(self._rows)

    def clear(self) -> None:
        """Drop everything, since the weights changed."""
        self._pending, self._num_pending = [], 0
        for active in list(self._texts):
            self._drop(self._texts.pop(active))

    def add(self, step: Computed) -> None:
        """Append a step with features, which must not be changed afterwards."""
        assert step.features is not None, "steps of the store have features"
        self._pending.append(step)
        self._num_pending += len(step.features) * _row_bytes(step.features)
        if self._num_pending > self._max_pending:
            self._store_pending()

    def find(
        self, tokens: Sequence[int], prompt_len: int
    ) -> Float[Tensor, "tokens features"] | None:
        """Return the features of a text; None if some are missing.

        The last row is NaN: an engine never computes the last token of a text, and no training
        target depends on it.
        """
        slots = self._slots(tokens, prompt_len)
        if not slots or self._rows is None:
            return None
        kept = self._rows[torch.tensor(slots, device=self._rows.device)]
        return torch.cat((kept, kept.new_full((1, kept.shape[1]), float("nan"))))

    def has(self, tokens: Sequence[int], prompt_len: int) -> bool:
        """Return whether `find` has the features of a text."""
        return bool(self._slots(tokens, prompt_len))

    def _slots(self, tokens: Sequence[int], prompt_len: int) -> list[int]:
        """Return the rows of all tokens but the last; none if some are missing."""
        self._store_pending()
        tokens = list(tokens)
        texts = self._groups.get(tuple(tokens[:prompt_len]), ())
        slots = self._shared_slots(tokens, min((each.start for each in texts), default=0))
        while len(slots) < len(tokens) - 1:
            found = (each.slots_from(len(slots), tokens[:-1]) for each in texts)
            furthest = max(found, key=len, default=[])
            if not furthest:
                return []
            slots += furthest
        return slots

    def _shared_slots(self, tokens: Sequence[int], count: int) -> list[int]:
        """Return the rows of the first `count` tokens, from any text that begins with them."""
        for text in self._whole.get(tuple(tokens[:PREFIX_BLOCK]), ()) if count else ():
            if text.end >= count and text.active.tokens[:count] == tokens[:count]:
                return text.slots[:count]
        return []

    def _store_pending(self) -> None:
        """Store the tokens of the pending steps in rows."""
        steps, self._pending, self._num_pending = self._pending, [], 0
        for step in steps:
            self._store(step)

    def _store(self, step: Computed) -> None:
        features, spans = step.features, list(step.spans())
        assert features is not None, "see `add`"
        if self._rows is None:
            size = self._max_kept // _row_bytes(features)
            self._rows = features.new_empty(size, features.shape[1])
            self._free = list(range(size))
        if not self._make_room(sum(len(each.rows) for each in spans)):
            return
        slots: list[int] = []
        rows: list[int] = []
        for each in spans:
            text = self._text_of(each)
            if text is not None:
                added = each.rows[text.end - each.start :]
                text.slots += (self._free.pop() for _ in added)
                slots += text.slots[len(text.slots) - len(added) :]
                rows += added
        if slots:  # one copy for all requests
            where = torch.tensor([slots, rows], device=features.device)
            self._rows[where[0]] = features[where[1]]

    def _make_room(self, count: int) -> bool:
        """Free at least `count` rows if possible; return whether they are free."""
        while len(self._free) < count and self._texts:
            self._drop(self._texts.pop(next(iter(self._texts))))
        return len(self._free) >= count

    def _text_of(self, each: TokenSpan) -> _Text | None:
        """Return the text that a span extends; None if its beginning is missing."""
        text = self._texts.pop(each.active, None)
        if text is not None and text.end < each.start:  # recomputed, after shared KV
            self._drop(text)
            text = None
        if text is None:
            if each.start > each.active.prompt_len:
                return None
            text = _Text(each.active, each.start)
            for texts, key in self._places(text):
                texts.setdefault(key, []).append(text)
        self._texts[each.active] = text
        return text

    def _drop(self, text: _Text) -> None:
        self._free += text.slots
        for texts, key in self._places(text):
            texts[key].remove(text)
            if not texts[key]:
                del texts[key]

    def _places(self, text: _Text) -> list[tuple[dict[_Tokens, list[_Text]], _Tokens]]:
        """Return the dictionaries that list a text, each with its key."""
        prompt = text.active.request.prompt_tokens
        own = [(self._whole, prompt[:PREFIX_BLOCK])] if text.start == 0 else []
        return [(self._groups, prompt), *own]


def _row_bytes(features: Tensor) -> int:
    return features.shape[1] * features.element_size()
