"""The texts of a rollout on their way to whoever learns from them: each text once, and as it grows.

    generators --take--> buffer (what is kept, held out, saved)
                     `-> news(worker) --> its own buffer

A worker's first news are all texts there are, those that were kept from the step before included;
then what was written since it was last told. Only the longest version of a text travels.
"""

from collections.abc import Iterable
from typing import final

from longtail.drafter.training.buffer import DrafterBuffer, Key, TextSnapshot


@final
class TextStream:
    """Begins a step of the buffer; keeps the longest version of each text of this rollout."""

    def __init__(self, buffer: DrafterBuffer, step: int) -> None:
        self._buffer = buffer
        self._texts: dict[Key, tuple[int, TextSnapshot]] = {}
        """With its number: each text, and each longer version of one, has the next."""
        self._last = 0
        self._heard: dict[int, int] = {}
        """By worker, the number up to which it was told."""
        buffer.begin(step)
        for text in buffer.snapshots():
            self._put(text)

    @property
    def has_texts(self) -> bool:
        """Whether there is anything to learn from."""
        return bool(self._texts)

    def take(self, texts: Iterable[TextSnapshot]) -> None:
        """Take in what is new, or longer than it was."""
        news = [text for text in texts if self._is_news(text)]
        for text in news:
            self._put(text)
        self._buffer.add(news)

    def news(self, worker: int) -> list[TextSnapshot]:
        """Return what a worker was not told yet."""
        heard = self._heard.get(worker, 0)
        return [text for number, text in self._texts.values() if number > heard]

    def told(self, worker: int) -> None:
        """Note that a worker has its news."""
        self._heard[worker] = self._last

    def forget(self, worker: int) -> None:
        """Note that a worker begins anew: whatever it was told is lost."""
        self._heard.pop(worker, None)

    def _put(self, text: TextSnapshot) -> None:
        self._last += 1
        self._texts[text.step, text.request_id] = self._last, text

    def _is_news(self, text: TextSnapshot) -> bool:
        if len(text.tokens) <= text.prompt_len:
            return False
        kept = self._texts.get((text.step, text.request_id))
        if kept is None:
            return True
        known = kept[1]
        longer = len(text.tokens) - len(known.tokens)
        return longer > 0 or (longer == 0 and text.is_finished and not known.is_finished)
