"""The guard: speculation that loses against plain decoding is paused, whoever wants it.

It compares what steps with drafts took with what plain ones are predicted to take for the same
tokens. Predictions of plain steps are corrected by plain steps, so a pause also renews what it is
judged by. Each pause that was followed by a loss doubles the next.
"""

from collections import deque
from typing import final

from longtail.tuner.cost import CostModel
from longtail.tuner.records import Outcome

_WINDOW = 32
"""Steps with drafts that are judged together."""
_TOLERANCE = 1.03
"""A loss within what the prediction is worth is none."""
_PAUSE, _LONGEST_PAUSE = 64, 2048
_STALL = 4.0
"""A step that took more than so many predicted plain steps was the machine's doing."""


@final
class Guard:
    """Watches the steps of one engine."""

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self._window: deque[tuple[float, float]] = deque()
        self._took = self._plain = 0.0
        self._pause, self._left = _PAUSE, 0

    @property
    def allows(self) -> bool:
        """Tell whether drafting is allowed in the next step."""
        return not self._left

    def learn(self, outcome: Outcome) -> str:
        """Judge a step; return the reason if a pause begins with it, else nothing."""
        if self._left:
            self._left -= 1
            return ""
        if not outcome.timings:
            return ""
        plain_s = self._costs.plain_s(outcome.batch)
        alike = plain_s * outcome.num_emitted / max(outcome.batch.num_sampled, 1)
        took = min(outcome.seconds, _STALL * plain_s)
        self._window.append((took, alike))
        self._took, self._plain = self._took + took, self._plain + alike
        if len(self._window) < _WINDOW:
            return ""
        if self._took <= self._plain * _TOLERANCE:
            self._pause = _PAUSE
            took, alike = self._window.popleft()
            self._took, self._plain = self._took - took, self._plain - alike
            return ""
        gain = self._plain / self._took
        self._window.clear()
        self._took = self._plain = 0.0
        self._left, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE)
        return (
            f"drafting gave {gain:.2f}x of plain decoding over {_WINDOW} steps at "
            f"{outcome.batch.num_sampled} running: paused for {self._left} steps"
        )
