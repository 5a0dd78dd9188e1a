"""Whether idle workers train the drafter in a rollout, and the texts on their way to them.

Training is stopped between two layers of the target or two chunks of rows, and the step waits for
that. Where this takes more than 1 % of a rollout, and workers are idle for about as long, training
costs more than it brings. Then it is tried again only after 1, 2, 4, ... rollouts, so that N
rollouts of that kind have about log2(N) + N / 16 trials.

A drafter may come trained on many texts like those of the policy. If all that the run can still add
is little beside them, training gains nothing, and where workers share memory it slows the others.
Then it is tried in one of 16 rollouts.
"""

from collections.abc import Iterable
from typing import final

from longtail.drafter.training.buffer import DrafterBuffer, Key, TextSnapshot

_LEAST = 3.0
"""Least seconds of training for each second in which a worker waits for its stop."""
_FREE = 0.01
"""Share of a rollout that a stop may always take."""
_MAX_WAIT = 16
_TRIALS = 4
"""Rollouts from which the tokens that a run will add are estimated."""
_LITTLE = 0.125
"""Share of the tokens known before below which added ones are little."""


@final
class IdleTraining:
    """Decides before each rollout; a rollout without any training decides nothing."""

    def __init__(self) -> None:
        self._wait, self._left = 1, 0
        """Rollouts without training after the next trial, and those that are left of this wait."""
        self.num_known = 0
        """Tokens like the policy's on which the drafter was trained before the run."""
        self._num_added = self._num_trials = 0
        """Tokens trained in this run, and rollouts in which it could be."""

    def wants(self, steps_left: int) -> bool:
        """Return whether idle workers train in the next rollout; called once for each.

        `steps_left` is the number of rollouts that are left in the run.
        """
        if self._left:
            self._left -= 1
            return False
        if self._adds_little(steps_left):
            self._left = _MAX_WAIT - 1
        return True

    def record(
        self, trained_s: float, waited_s: float, rollout_s: float, num_tokens: int = 0
    ) -> None:
        """Record a rollout in which workers might train: seconds, summed over workers, and tokens.

        They are those of training, of its stop, and of the whole rollout.
        """
        self._num_added += num_tokens
        self._num_trials += 1
        if trained_s <= 0.0:
            return
        if waited_s <= _FREE * rollout_s or trained_s >= _LEAST * waited_s:
            self._wait = 1
            return
        self._left = max(self._left, self._wait)
        self._wait = min(2 * self._wait, _MAX_WAIT)

    def _adds_little(self, steps_left: int) -> bool:
        if self._num_trials < _TRIALS:
            return False
        return self._num_added / self._num_trials * steps_left < _LITTLE * self.num_known


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
