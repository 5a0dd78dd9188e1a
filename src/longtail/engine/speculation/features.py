"""What the target computed for the texts it wrote, kept for whoever trains a drafter on them.

    step --waits--spans--> a row for each token of a text, once --find(tokens)--> its rows

A feature follows from the weights and the tokens up to there. So a text is found by its tokens,
whoever wrote it: siblings share the rows of their prompt, as they share its KV, a text that another
worker wrote is not there, and a window that begins inside a text is not taken for its beginning.
When the weights change, everything goes.

Whoever writes last trains least. So a step costs its engine an append: steps wait as they are, the
nodes that were rejected included, until a text is asked for or they are many.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from longtail.engine.request import ActiveRequest
from longtail.engine.speculation.queue import Computed, TokenSpan
from longtail.speculation.taps import Taps

_WAITING = 4
"""One part in so many of the memory is for steps that wait."""


@dataclass(slots=True, eq=False)
class _Text:
    """Rows of a request's tokens from `start` on: from 0, or from where a sibling's KV ended."""

    active: ActiveRequest
    start: int
    slots: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.start + len(self.slots)

    def slots_from(self, at: int, tokens: Sequence[int]) -> list[int]:
        """Rows of `tokens` from `at` on, as far as there are some; the prompt is the same one."""
        prompt_len, end = self.active.prompt_len, min(self.end, len(tokens))
        if self.active.tokens[prompt_len:end] != tokens[prompt_len:end]:
            end = min(end, prompt_len)
        return self.slots[at - self.start : end - self.start] if self.start <= at < end else []


@final
class FeatureStore:
    """Features of the texts that were written last, in at most `max_bytes`.

    Where room is short, the request that was heard of longest ago goes as a whole: those that are
    done before those that run. A request that is computed anew keeps the rows that it had.
    """

    def __init__(self, taps: Taps, max_bytes: int) -> None:
        assert taps.any, "nothing to keep"
        self.taps = taps
        self._most_waiting = max_bytes // _WAITING
        self._most_kept = max_bytes - self._most_waiting
        self._waiting: list[Computed] = []
        self._num_waiting = 0
        """Their bytes."""
        self._rows: Tensor | None = None
        """Made with the first step, which knows shape and dtype; touched only where written."""
        self._free: list[int] = []
        self._texts: dict[ActiveRequest, _Text] = {}
        """In the order in which they were heard of last."""
        self._groups: dict[tuple[int, ...], list[_Text]] = {}
        """By prompt."""

    @property
    def num_bytes(self) -> int:
        """Memory of steps that wait, and of rows that are taken."""
        if self._rows is None:
            return self._num_waiting
        return self._num_waiting + (len(self._rows) - len(self._free)) * _row_bytes(self._rows)

    def clear(self) -> None:
        """Drop everything: the weights are other ones."""
        self._waiting, self._num_waiting = [], 0
        for active in list(self._texts):
            self._drop(self._texts.pop(active))

    def add(self, step: Computed) -> None:
        """Take note of a step that was tapped for this; its features are not written to again."""
        assert step.features is not None, "the step was tapped for it"
        self._waiting.append(step)
        self._num_waiting += len(step.features) * _row_bytes(step.features)
        if self._num_waiting > self._most_waiting:
            self._settle()

    def find(
        self, tokens: Sequence[int], prompt_len: int
    ) -> Float[Tensor, "tokens features"] | None:
        """Return the features of a text, None if some are not there.

        The last row is NaN. An engine never computes the last token of a text, and no prediction
        that is learned depends on it.
        """
        self._settle()
        tokens = list(tokens)
        texts = self._groups.get(tuple(tokens[:prompt_len]), ())
        slots: list[int] = []
        while len(slots) < len(tokens) - 1:
            found = (each.slots_from(len(slots), tokens[:-1]) for each in texts)
            furthest = max(found, key=len, default=[])
            if not furthest:
                return None
            slots += furthest
        if not slots or self._rows is None:
            return None
        kept = self._rows[torch.tensor(slots, device=self._rows.device)]
        return torch.cat((kept, kept.new_full((1, kept.shape[1]), float("nan"))))

    def _settle(self) -> None:
        """Give the tokens of the steps that wait a row each."""
        steps, self._waiting, self._num_waiting = self._waiting, [], 0
        for step in steps:
            self._take(step)

    def _take(self, step: Computed) -> None:
        features, spans = step.features, list(step.spans())
        assert features is not None, "see `add`"
        if self._rows is None:
            size = self._most_kept // _row_bytes(features)
            self._rows = features.new_empty(size, features.shape[1])
            self._free = list(range(size))
        if not self._make_room(sum(len(each.rows) for each in spans)):
            return
        slots: list[int] = []
        rows: list[int] = []
        for each in spans:
            text = self._continued(each)
            if text is not None:
                news = each.rows[text.end - each.start :]
                text.slots += (self._free.pop() for _ in news)
                slots += text.slots[len(text.slots) - len(news) :]
                rows += news
        if slots:  # one copy for all requests
            where = torch.tensor([slots, rows], device=features.device)
            self._rows[where[0]] = features[where[1]]

    def _make_room(self, count: int) -> bool:
        """Have so many rows free, if there can be so many."""
        while len(self._free) < count and self._texts:
            self._drop(self._texts.pop(next(iter(self._texts))))
        return len(self._free) >= count

    def _continued(self, each: TokenSpan) -> _Text | None:
        """Return the text that a stretch goes on with; None if its beginning is not there."""
        text = self._texts.pop(each.active, None)
        if text is not None and text.end < each.start:  # it began anew, behind a sibling's prompt
            self._drop(text)
            text = None
        if text is None:
            if each.start > each.active.prompt_len:
                return None
            text = _Text(each.active, each.start)
            self._groups.setdefault(each.active.request.prompt_tokens, []).append(text)
        self._texts[each.active] = text
        return text

    def _drop(self, text: _Text) -> None:
        self._free += text.slots
        prompt = text.active.request.prompt_tokens
        self._groups[prompt].remove(text)
        if not self._groups[prompt]:
            del self._groups[prompt]


def _row_bytes(features: Tensor) -> int:
    return features.shape[1] * features.element_size()
