"""The guard: it pauses speculation that is slower than plain decoding, with any tuner.

The guard compares the seconds of steps with drafts with the predicted seconds of plain decoding for
the same tokens. Plain steps correct that prediction, so a pause also renews the comparison. Each
pause that ends in another loss doubles the next pause.
"""

from collections import deque
from typing import final

from longtail.tuner.cost import CostModel
from longtail.tuner.records import Outcome

_WINDOW = 32
"""Number of steps with drafts that are judged together."""
_TOLERANCE = 1.03
"""Ratio of seconds up to which a loss is within the error of the prediction."""
_PAUSE, _MAX_PAUSE = 64, 2048
"""Steps of the first and of the longest pause."""
_STALL = 4.0
"""Multiple of a predicted plain step at which a step's seconds are capped, as a machine stall."""


@final
class Guard:
    """Judges the steps of one engine."""

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self._window: deque[tuple[float, float]] = deque()
        self._draft_s = self._plain_s = 0.0
        self._next_pause, self._left = _PAUSE, 0

    @property
    def allows(self) -> bool:
        """Whether the next step may draft."""
        return not self._left

    def learn(self, outcome: Outcome) -> str:
        """Judge a step; return the reason if a pause begins after it, else an empty string."""
        if self._left:
            self._left -= 1
            return ""
        if not outcome.timings:
            return ""
        step_s = self._costs.plain_s(outcome.batch)
        plain_s = step_s * outcome.num_emitted / max(outcome.batch.num_sampled, 1)
        draft_s = min(outcome.seconds, _STALL * step_s)
        self._window.append((draft_s, plain_s))
        self._draft_s, self._plain_s = self._draft_s + draft_s, self._plain_s + plain_s
        if len(self._window) < _WINDOW:
            return ""
        if self._draft_s <= self._plain_s * _TOLERANCE:
            self._next_pause = _PAUSE
            draft_s, plain_s = self._window.popleft()
            self._draft_s, self._plain_s = self._draft_s - draft_s, self._plain_s - plain_s
            return ""
        gain = self._plain_s / self._draft_s
        self._window.clear()
        self._draft_s = self._plain_s = 0.0
        self._left, self._next_pause = self._next_pause, min(2 * self._next_pause, _MAX_PAUSE)
        return (
            f"drafting gave {gain:.2f}x of plain decoding over {_WINDOW} steps at "
            f"{outcome.batch.num_sampled} running: paused for {self._left} steps"
        )
