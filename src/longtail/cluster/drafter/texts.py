"""The texts of a rollout on their way to the workers that train the drafter."""

from collections.abc import Iterable
from typing import final

from longtail.drafter.training.buffer import DrafterBuffer, Key, TextSnapshot


@final
class TextStream:
    """Begins a step of the buffer, and keeps the longest version of each text of the rollout."""

    def __init__(self, buffer: DrafterBuffer, step: int) -> None:
        self._buffer = buffer
        self._texts: dict[Key, tuple[int, TextSnapshot]] = {}
        """Each text with its number; a longer version of a text has a new number."""
        self._last = 0
        self._sent: dict[int, int] = {}
        """Largest number sent to each worker."""
        buffer.begin(step)
        for text in buffer.snapshots():
            self._put(text)

    @property
    def has_texts(self) -> bool:
        """Whether there is any text."""
        return bool(self._texts)

    def add(self, texts: Iterable[TextSnapshot]) -> None:
        """Add the texts that are new, or longer than before."""
        added = [text for text in texts if self._is_new(text)]
        for text in added:
            self._put(text)
        self._buffer.add(added)

    def unsent(self, worker: int) -> list[TextSnapshot]:
        """Return the texts that a worker does not have."""
        sent = self._sent.get(worker, 0)
        return [text for number, text in self._texts.values() if number > sent]

    def mark_sent(self, worker: int) -> None:
        """Record that a worker has all texts."""
        self._sent[worker] = self._last

    def forget(self, worker: int) -> None:
        """Record that a worker was replaced and has no text."""
        self._sent.pop(worker, None)

    def _put(self, text: TextSnapshot) -> None:
        self._last += 1
        self._texts[text.step, text.request_id] = self._last, text

    def _is_new(self, text: TextSnapshot) -> bool:
        if len(text.tokens) <= text.prompt_len:
            return False
        kept = self._texts.get((text.step, text.request_id))
        if kept is None:
            return True
        known = kept[1]
        longer = len(text.tokens) - len(known.tokens)
        return longer > 0 or (longer == 0 and text.is_finished and not known.is_finished)
