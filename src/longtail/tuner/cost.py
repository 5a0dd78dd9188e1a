"""What engine steps and drafts cost on this machine: measured at the start, corrected since.

    seconds of a step = curve(flat tokens) + pair_s x (token, token of its context) pairs
                        + node_pair_s x (draft node, token of its context) pairs
    seconds of a draft = start + requests x request_s + passes x level_s + rows x row_s

A request's draft reads the context that its token reads anyway, so its pairs are cheaper.

There are two curves, one for plain steps and one for steps that verify drafts (the drafter is told
how they fared; requests are fewer than tokens). Both begin as the same measurement.

These machines stall, so a correction follows the logarithm of observed / predicted, clipped: a step
that took a hundred times too long moves a prediction as far as one that took a third too long.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, final

import numpy as np
from jaxtyping import Float, Int

from longtail.tuner.records import Batch, Outcome

_RATE, _CLIP = 0.06, 0.3
"""Share of an error by which one observation moves a prediction at its own place, and the greatest
error, as a logarithm, that one observation is believed."""
_EARLY = 16
"""Observations that count more, the first ones most."""
_EAGER, _EVERY = 64, 6
"""Steps that are all learned from; after them, of those with drafts, one of six: a step may be a
millisecond."""
_ELSEWHERE = 0.8
"""Share of a correction that all other places get: most errors are the whole machine's, and a
correction of one place bends the curve there, which is what marginal costs are read from."""
_OTHER = 0.3
"""Share of it that the other kind of step gets: the two differ by what only one of them does."""


@final
class TimeCurve:
    """Seconds by a count, linear between knots; more never takes less time."""

    def __init__(self, counts: Sequence[int], seconds: Sequence[float]) -> None:
        assert len(counts) == len(seconds) >= 1, "a curve needs a measurement"
        assert all(a < b for a, b in pairwise(counts)), "rising counts"
        assert all(second > 0 for second in seconds), "time passes"
        if len(counts) == 1:  # the least that can be said: half of it is there without any token
            counts, seconds = (0, *counts), (seconds[0] / 2, *seconds)
        self._counts, self._raw = list(counts), list(seconds)
        self._scale = 1.0
        self._num_seen = 0
        self._refresh()

    def at(self, count: int) -> float:
        """Predict the seconds of so many."""
        left, share = self._piece(max(count, self._counts[0]))
        known = self._known
        return self._scale * (known[left] + share * (known[left + 1] - known[left]))

    def at_each(self, counts: Int[np.ndarray, "n"]) -> Float[np.ndarray, "n"]:
        """Predict the seconds of each count."""
        known = np.interp(counts, self._counts, self._known)
        beyond = counts - self._counts[-1]
        return self._scale * (known + np.maximum(beyond, 0) * self._last_slope())

    def slope(self, count: int) -> float:
        """Seconds that one more takes, from `count` to an eighth more."""
        more = max(1, count // 8)
        return (self.at(count + more) - self.at(count)) / more

    def correct(self, count: int, error: float) -> float:
        """Move by an error, log(observed / predicted), most near `count`; return by how much."""
        moved = _moved(error, self._num_seen)
        self._num_seen += 1
        self._scale *= 1 + moved * _ELSEWHERE
        left, share = self._piece(count)
        share = min(max(share, 0.0), 1.0)
        for place, weight in ((left, 1.0 - share), (left + 1, share)):
            self._raw[place] *= 1 + moved * weight * (1 - _ELSEWHERE)
        self._refresh()
        return moved

    def scale(self, moved: float) -> None:
        """Move everywhere by what another curve learned at its place.

        A curve that has seen little itself is taken to be as wrong as the other one.
        """
        self._scale *= 1 + moved * (_OTHER if self._num_seen >= _EARLY else 1.0)

    def numbers(self) -> dict[str, list[float]]:
        """Return knots and seconds."""
        seconds = [self._scale * second for second in self._known]
        return {"counts": [float(count) for count in self._counts], "seconds": seconds}

    def _piece(self, count: int) -> tuple[int, float]:
        """Find the knot to the left of a count, and how far it is to the next; beyond: over 1."""
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
    """Seconds of one drafter's proposals.

    Example: DraftCost(start_s=1e-4, request_s=8e-6, level_s=5e-5, row_s=6e-6)
    """

    start_s: float
    request_s: float
    level_s: float
    """A pass, however many rows."""
    row_s: float
    """A row of a pass."""

    def seconds(self, num_requests: int, levels: float, rows: float) -> float:
        """Predict a proposal for so many requests, with so many passes over so many rows."""
        return (
            self.start_s + num_requests * self.request_s + levels * self.level_s + rows * self.row_s
        )

    def scaled(self, factor: float) -> "DraftCost":
        """Multiply everything."""
        return DraftCost(
            start_s=factor * self.start_s,
            request_s=factor * self.request_s,
            level_s=factor * self.level_s,
            row_s=factor * self.row_s,
        )


@final
class CostModel:
    """Predicts steps and drafts, and is told what they took.

    Example: CostModel(TimeCurve((1, 64), (1e-3, 6e-3)), pair_s=1e-7, node_pair_s=2e-8)
    """

    def __init__(self, measured: TimeCurve, *, pair_s: float, node_pair_s: float) -> None:
        numbers = measured.numbers()
        counts = [int(count) for count in numbers["counts"]]
        self.plain = TimeCurve(counts, numbers["seconds"])
        self.verify = TimeCurve(counts, numbers["seconds"])
        self.pair_s, self.node_pair_s = pair_s, node_pair_s
        self.drafts: list[DraftCost] = []
        """Of each drafter, in their order."""
        self._num_drafts = self._num_steps = 0

    def plain_s(self, batch: Batch) -> float:
        """Predict the step without drafts."""
        return self.plain.at(batch.num_tokens) + self.pair_s * batch.num_pairs

    def verify_s(self, batch: Batch, num_nodes: int) -> float:
        """Predict the step with drafts of so many nodes in all, the drafting excluded."""
        read = self.pair_s * batch.num_pairs + self.node_pair_s * num_nodes * batch.mean_context
        return self.verify.at(batch.num_tokens + num_nodes) + read

    def verify_each(self, batch: Batch, num_nodes: Int[np.ndarray, "n"]) -> Float[np.ndarray, "n"]:
        """`verify_s` of each number of nodes."""
        read = self.pair_s * batch.num_pairs + self.node_pair_s * num_nodes * batch.mean_context
        return self.verify.at_each(batch.num_tokens + num_nodes) + read

    def node_s(self, batch: Batch, num_nodes: int) -> float:
        """Seconds that one more node takes behind so many."""
        slope = self.verify.slope(batch.num_tokens + num_nodes)
        return slope + self.node_pair_s * batch.mean_context

    def learn(self, outcome: Outcome) -> None:
        """Correct the predictions by what one step took; later on not by all that drafted."""
        self._num_steps += 1
        if outcome.timings and self._num_steps > _EAGER and self._num_steps % _EVERY:
            return
        batch, nodes = outcome.batch, outcome.num_nodes
        for timing in outcome.timings:
            cost = self.drafts[timing.drafter]
            predicted = cost.seconds(timing.num_requests, float(timing.levels), float(timing.rows))
            moved = _moved(_error(timing.seconds, predicted), self._num_drafts)
            self.drafts[timing.drafter] = cost.scaled(1 + moved)
            self._num_drafts += 1
        drafted = bool(outcome.timings)
        predicted = self.verify_s(batch, nodes) if drafted else self.plain_s(batch)
        error = _error(outcome.verify_s, predicted)
        mine, other = (self.verify, self.plain) if drafted else (self.plain, self.verify)
        other.scale(mine.correct(batch.num_tokens + nodes, error))

    def numbers(self) -> dict[str, Any]:
        """Return everything as JSON holds it."""
        return {
            "plain": self.plain.numbers(),
            "verify": self.verify.numbers(),
            "pair_s": self.pair_s,
            "node_pair_s": self.node_pair_s,
            "drafts": [asdict(draft) for draft in self.drafts],
        }

    @staticmethod
    def of(numbers: Mapping[str, Any]) -> "CostModel":
        """Make the model that `numbers` describes; KeyError or TypeError if they describe none."""

        def curve(name: str) -> TimeCurve:
            known = numbers[name]
            return TimeCurve([int(count) for count in known["counts"]], known["seconds"])

        model = CostModel(
            curve("plain"),
            pair_s=float(numbers["pair_s"]),
            node_pair_s=float(numbers["node_pair_s"]),
        )
        model.verify = curve("verify")
        model.drafts = [DraftCost(**draft) for draft in numbers["drafts"]]
        return model


def fit_draft_cost(rounds: Sequence[tuple[int, int, int, float]]) -> DraftCost:
    """Fit (requests, passes, rows, seconds) of some proposals, no part below zero.

    Least squares of relative errors, so that short proposals count as much as long ones; a part
    that comes out negative is left out and the rest fitted again.
    """
    table = np.array(rounds, dtype=np.float64)
    seconds = table[:, 3]
    columns = np.column_stack([np.ones(len(table)), table[:, 0], table[:, 1], table[:, 2]])
    weighted = columns / seconds[:, None]
    kept = list(range(4))
    found = np.zeros(4)
    while kept:
        solution = np.linalg.lstsq(weighted[:, kept], np.ones(len(table)), rcond=None)[0]
        if (solution >= 0).all():
            found[kept] = solution
            break
        kept.pop(int(solution.argmin()))
    start_s, request_s, level_s, row_s = (float(value) for value in found)
    cost = DraftCost(start_s=start_s, request_s=request_s, level_s=level_s, row_s=row_s)
    return replace(cost, start_s=max(start_s, 1e-7))  # a proposal is never free


def _error(observed: float, predicted: float) -> float:
    return math.log(max(observed, 1e-9) / predicted)


def _moved(error: float, num_seen: int) -> float:
    """Return by how much to move a prediction, given an error behind so many observations."""
    early = num_seen < _EARLY
    clip, rate = (1.0, max(1 / (num_seen + 2), _RATE)) if early else (_CLIP, _RATE)
    return rate * min(max(error, -clip), clip)
