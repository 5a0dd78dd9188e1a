"""The cost model of engine steps and drafts: measured at the start, corrected by each step.

    seconds of a step = curve(flat tokens) + pair_s x (token, token of its context) pairs
                        + node_pair_s x (draft node, token of its context) pairs
    seconds of a draft = start + requests x request_s + passes x level_s + rows x row_s

The nodes of a draft read the context that the request's token reads anyway, so their pairs are
cheaper.

Plain steps and steps that verify drafts have separate curves, which start from the same
measurement: steps with drafts include the drafters' learning.

Machines stall, so a correction follows the clipped logarithm of observed / predicted: a step that
takes a hundred times too long moves a prediction as far as one that takes a third too long.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import final

import numpy as np
from jaxtyping import Float, Int

from longtail.tuner.messages import Batch, DraftTiming, Outcome

_RATE, _CLIP = 0.06, 0.3
"""Fraction of an error by which one observation corrects a prediction, and the clip of the error (a
logarithm)."""
_EARLY = 16
"""Number of first observations that have larger rates and a larger clip."""
_GLOBAL_SHARE = 0.8
"""Fraction of a correction that scales the whole curve: most errors are of the whole machine, and a
local correction bends the curve, whose slope gives marginal costs."""
_BLOCK = 4
"""Rows that a matrix product computes together on many machines, at least."""
_OTHER_SHARE = 0.3
"""Fraction of a correction that also scales the curve of the other kind of step."""


@final
class TimeCurve:
    """Seconds by number of tokens: piecewise linear and not decreasing.

    A measurement above that of a larger count is a stall of the machine, and is lowered to it.
    """

    def __init__(self, counts: Sequence[int], seconds: Sequence[float]) -> None:
        assert len(counts) == len(seconds) >= 1, "a curve needs a measurement"
        if len(counts) == 1:  # assume that half of the seconds are fixed costs
            counts, seconds = (0, *counts), (seconds[0] / 2, *seconds)
        self._counts, self._raw = list(counts), list(accumulate(seconds, max))
        self._scale = 1.0
        self._num_seen = 0
        self._refresh()

    def at(self, count: int) -> float:
        """Predict the seconds of a count."""
        left, share = self._piece(max(count, self._counts[0]))
        known = self._known
        return self._scale * (known[left] + share * (known[left + 1] - known[left]))

    def at_each(self, counts: Int[np.ndarray, "n"]) -> Float[np.ndarray, "n"]:
        """Predict the seconds of each count."""
        known = np.interp(counts, self._counts, self._known)
        beyond = counts - self._counts[-1]
        return self._scale * (known + np.maximum(beyond, 0) * self._last_slope())

    def slope(self, count: int) -> float:
        """Return the mean seconds of each of the last tokens of `count`: an eighth, or a block."""
        count = max(count, 2)
        fewer = max(count - max(_BLOCK, count // 8), 1)
        return (self.at(count) - self.at(fewer)) / (count - fewer)

    def correct(self, count: int, error: float) -> float:
        """Correct by log(observed / predicted), most near `count`; return the correction."""
        moved = _moved(error, self._num_seen)
        self._num_seen += 1
        self._scale *= 1 + moved * _GLOBAL_SHARE
        left, share = self._piece(count)
        share = min(max(share, 0.0), 1.0)
        for place, weight in ((left, 1.0 - share), (left + 1, share)):
            self._raw[place] *= 1 + moved * weight * (1 - _GLOBAL_SHARE)
        self._refresh()
        return moved

    def scale(self, moved: float) -> None:
        """Scale the curve by a part of another curve's correction; early on by all of it."""
        self._scale *= 1 + moved * (_OTHER_SHARE if self._num_seen >= _EARLY else 1.0)

    def _piece(self, count: int) -> tuple[int, float]:
        """Return the knot to the left of a count, and the fraction of the way to the next knot."""
        counts = self._counts
        left = min(max(bisect_right(counts, count), 1), len(counts) - 1) - 1
        return left, (count - counts[left]) / (counts[left + 1] - counts[left])

    def _refresh(self) -> None:
        self._known = list(accumulate(self._raw, max))

    def _last_slope(self) -> float:
        more = self._counts[-1] - self._counts[-2]
        return (self._known[-1] - self._known[-2]) / more


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCost:
    """Seconds of one drafter's proposals, by part."""

    start_s: float
    request_s: float
    level_s: float
    """Fixed seconds of a pass."""
    row_s: float
    """Seconds of a row of a pass."""

    def seconds(self, num_requests: int, levels: float, rows: float) -> float:
        """Predict the seconds of proposals with `levels` passes over `rows` rows in all."""
        return (
            self.start_s + num_requests * self.request_s + levels * self.level_s + rows * self.row_s
        )

    def of(self, timing: DraftTiming) -> float:
        """Predict the seconds of proposals of this size."""
        levels, rows = float(timing.levels), float(timing.rows)
        return self.seconds(timing.num_requests, levels, rows)

    def scaled(self, factor: float) -> "DraftCost":
        """Return all parts multiplied by a factor."""
        return DraftCost(**{name: factor * part for name, part in asdict(self).items()})


@final
class CostModel:
    """Predicts the seconds of steps and drafts, and learns from observed ones."""

    def __init__(self, measured: TimeCurve, *, pair_s: float, node_pair_s: float) -> None:
        self.plain, self.verify = measured, deepcopy(measured)
        self.pair_s, self.node_pair_s = pair_s, node_pair_s
        self.drafts: list[DraftCost] = []
        """Costs of each drafter, in the engine's order."""
        self._num_drafts = 0

    def plain_s(self, batch: Batch) -> float:
        """Predict the seconds of a step without drafts."""
        return self.plain.at(batch.num_tokens) + self.pair_s * batch.num_pairs

    def verify_s(self, batch: Batch, num_nodes: int) -> float:
        """Predict the seconds of a step that verifies `num_nodes` nodes, without drafting."""
        read = self.pair_s * batch.num_pairs + self.node_pair_s * num_nodes * batch.mean_context
        return self.verify.at(batch.num_tokens + num_nodes) + read

    def verify_each(self, batch: Batch, num_nodes: Int[np.ndarray, "n"]) -> Float[np.ndarray, "n"]:
        """Predict `verify_s` for each number of nodes."""
        read = self.pair_s * batch.num_pairs + self.node_pair_s * num_nodes * batch.mean_context
        return self.verify.at_each(batch.num_tokens + num_nodes) + read

    def node_s(self, batch: Batch, num_nodes: int) -> float:
        """Predict the mean seconds of a node, of the last ones of `num_nodes`."""
        slope = self.verify.slope(batch.num_tokens + num_nodes)
        return slope + self.node_pair_s * batch.mean_context

    def outcome_s(self, outcome: Outcome) -> float:
        """Predict the seconds of a step from what it drafted and verified."""
        if not outcome.timings:
            return self.plain_s(outcome.batch)
        drafts_s = sum(self.drafts[each.drafter].of(each) for each in outcome.timings)
        return drafts_s + self.verify_s(outcome.batch, outcome.num_nodes)

    def learn(self, outcome: Outcome) -> None:
        """Correct the predictions by the seconds of one step."""
        batch, nodes = outcome.batch, outcome.num_nodes
        for timing in outcome.timings:
            cost = self.drafts[timing.drafter]
            moved = _moved(_error(timing.seconds, cost.of(timing)), self._num_drafts)
            self.drafts[timing.drafter] = cost.scaled(1 + moved)
            self._num_drafts += 1
        verifies = nodes > 0  # without nodes it computes what a plain step does
        predicted = self.verify_s(batch, nodes) if verifies else self.plain_s(batch)
        error = _error(outcome.verify_s, predicted)
        mine, other = (self.verify, self.plain) if verifies else (self.plain, self.verify)
        other.scale(mine.correct(batch.num_tokens + nodes, error))


def fit_draft_cost(rounds: Sequence[tuple[int, int, int, float]]) -> DraftCost:
    """Fit the parts, none negative, to (requests, passes, rows, seconds) of some proposals.

    Least squares of relative errors, so that short proposals count as much as long ones. A negative
    part is set to zero and the rest is fitted again.
    """
    table = np.array(rounds, dtype=np.float64)
    columns = np.column_stack([np.ones(len(table)), table[:, :3]])
    weighted = columns / table[:, 3:]
    kept = list(range(4))
    found = np.zeros(4)
    while kept:
        solution = np.linalg.lstsq(weighted[:, kept], np.ones(len(table)), rcond=None)[0]
        if (solution >= 0).all():
            found[kept] = solution
            break
        kept.pop(int(solution.argmin()))
    start_s, request_s, level_s, row_s = (float(value) for value in found)
    start_s = max(start_s, 1e-7)  # a proposal is never free
    return DraftCost(start_s=start_s, request_s=request_s, level_s=level_s, row_s=row_s)


def _error(observed: float, predicted: float) -> float:
    return math.log(max(observed, 1e-9) / predicted)


def _moved(error: float, num_seen: int) -> float:
    """Return the relative correction for an error after `num_seen` observations."""
    early = num_seen < _EARLY
    clip, rate = (1.0, max(1 / (num_seen + 2), _RATE)) if early else (_CLIP, _RATE)
    return rate * min(max(error, -clip), clip)
