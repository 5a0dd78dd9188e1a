"""When a worker trains the drafter after a rollout: while that saves more time than it takes.

A worker alone never idles, and workers whose shards end together are idle too briefly to train and
measure a drafter. Then each second of training is added to the step. It is bounded by a share of
the rollout, and spent only if measurements promise it back within the run:

    acceptance     measured by the trainer on held-out text; it rises by a part per doubling of the
                   trained tokens, and the last two measurements tell by how much
    seconds        of a rollout with that acceptance, from the cost model and the numbers of running
                   requests in the last rollout
    pays           if, for 1, 2, 4, ... further trainings,
                   (seconds now - seconds then) x rollouts left  >  seconds of these trainings

Nothing is known before two measurements, and little long after the last: then it trains for one
rollout to measure, with a wait that doubles each time it did not pay. A drafter that was trained
before and has lost no acceptance on the policy is not tried: its measurements come from idle time.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from longtail.drafter.eagle.loss import expected_accept_len
from longtail.drafter.formats.checkpoint import LoadedDrafter
from longtail.drafter.training.replica import SpotEnd, SpotReport
from longtail.drafter.training.texts import pack_texts
from longtail.drafter.training.trainer import DrafterTrainer, TrainerSettings
from longtail.engine.engine import RolloutEngine
from longtail.engine.request import EngineLimits
from longtail.engine.rollout_log import RolloutSeries
from longtail.model.hf.tokenizer import Tokenizer
from longtail.rl.data.examples import Example
from longtail.tuner.cost import CostModel
from longtail.types import Request

SHARE = 0.1
"""Most seconds of training, as a share of the rollout's."""
_DEPTHS = (1, 2, 3, 4, 6, 8)
"""Lengths of the chains that are compared."""
_MEASURED_DEPTHS = 6
"""Depth of the chain that the trainer's accept length is of."""
_MAX_WAIT = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningPoint:
    """A measurement of the drafter in training.

    Example: LearningPoint(num_tokens=24_000, accept_len=1.9)
    """

    num_tokens: int
    """Number of tokens trained until then."""
    accept_len: float


@final
class PayOff:
    """Decides after each rollout how long to train."""

    def __init__(self) -> None:
        self._tries = True
        """Whether to train without measurements."""
        self._points: list[LearningPoint] = []
        self._num_tokens = 0
        self._tokens_per_s = 0.0
        self._saved_s = self._needed_s = 0.0
        """Seconds not spent yet, and those that a measurement takes."""
        self._wait, self._left = 1, 0
        """Rollouts without training after the next trial, and those that are left of this wait."""

    def expect(self, num_tokens: int) -> None:
        """Begin with a drafter that was trained on `num_tokens` tokens like the policy's."""
        self._num_tokens, self._tries = num_tokens, num_tokens == 0

    def limit_s(
        self, seconds: float, series: RolloutSeries | None, costs: CostModel | None, steps_left: int
    ) -> float:
        """Return the seconds to train after a rollout of `seconds`; 0: do not.

        `steps_left` is the number of rollouts that a better drafter would still serve. The seconds
        of short rollouts are saved until they suffice for a measurement.
        """
        if steps_left <= 0 or series is None or costs is None or not costs.drafts:
            return 0.0
        budget_s = SHARE * seconds
        if not self._wants(budget_s, series, costs, steps_left):
            return 0.0
        self._saved_s += budget_s
        if self._saved_s < self._needed_s:
            return 0.0
        spent_s, self._saved_s = self._saved_s, 0.0
        return spent_s

    def state(self) -> dict[str, Any]:
        """Return the state, fit for JSON."""
        return {
            "points": [[each.num_tokens, each.accept_len] for each in self._points],
            "num_tokens": self._num_tokens,
            "tokens_per_s": self._tokens_per_s,
            "saved_s": self._saved_s,
            "needed_s": self._needed_s,
            "wait": self._wait,
            "left": self._left,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state."""
        self._points = [
            LearningPoint(num_tokens=count, accept_len=length) for count, length in state["points"]
        ]
        self._num_tokens, self._tokens_per_s = state["num_tokens"], state["tokens_per_s"]
        self._saved_s, self._needed_s = state["saved_s"], state["needed_s"]
        self._wait, self._left = state["wait"], state["left"]

    def record(self, report: SpotReport) -> None:
        """Add the measurement of a training after a rollout; without one, save longer for it."""
        self.record_idle(report)
        if report.replica is None and report.reason is SpotEnd.STOPPED:
            self._needed_s = 2 * max(self._needed_s, report.seconds)

    def record_idle(self, report: SpotReport) -> None:
        """Add the measurement of a training in idle time, if it made one."""
        self._num_tokens += report.num_tokens
        found = report.replica
        if found is None:
            return
        is_new = not self._points or self._num_tokens > self._points[-1].num_tokens
        if math.isfinite(found.accept_len) and is_new:
            self._tokens_per_s = report.num_tokens / report.seconds
            self._points.append(
                LearningPoint(num_tokens=self._num_tokens, accept_len=found.accept_len)
            )
            self._left, self._wait = self._wait, min(2 * self._wait, _MAX_WAIT)

    def _wants(
        self, budget_s: float, series: RolloutSeries, costs: CostModel, steps_left: int
    ) -> bool:
        """Return whether to train now: it pays, or it is time to measure again."""
        if len(self._points) < 2:
            return self._tries
        if self._pays(budget_s, series, costs, steps_left):
            self._wait, self._left = 1, 0
            return True
        if self._left:
            self._left -= 1
            return False
        return True

    def _pays(
        self, budget_s: float, series: RolloutSeries, costs: CostModel, steps_left: int
    ) -> bool:
        """Return whether some number of further trainings saves more than it takes."""
        now_s = rollout_s(series, costs, self._points[-1].accept_len)
        tokens, count = self._tokens_per_s * budget_s, 1
        while count <= steps_left:
            later = self._expected(self._num_tokens + count * tokens)
            saved_s = now_s - rollout_s(series, costs, later)
            if saved_s * (steps_left - count / 2) > count * budget_s:
                return True
            count *= 2
        return False

    def _expected(self, num_tokens: float) -> float:
        """Extrapolate the accept length: it rises by a part per doubling of the tokens."""
        before, last = self._points[-2:]
        doublings = math.log2(last.num_tokens / max(before.num_tokens, 1))
        rise = max(last.accept_len - before.accept_len, 0.0) / max(doublings, 0.1)
        reached = last.accept_len + rise * math.log2(max(num_tokens / last.num_tokens, 1.0))
        return min(reached, 1.0 + _MEASURED_DEPTHS)


def rollout_s(series: RolloutSeries, costs: CostModel, accept_len: float) -> float:
    """Predict the seconds of a rollout like `series` with a drafter of this accept length.

    `accept_len` is that of a chain of 6 tokens, whose tokens are accepted independently. Where
    plain decoding is faster, it is used.
    """
    acceptance = _acceptance(accept_len)
    cost = max(costs.drafts, key=lambda draft: draft.seconds(1, 6.0, 6.0))
    speeds: dict[int, float] = {}
    total = 0.0
    for running, accepted in zip(series.running, series.accepted, strict=True):
        if running not in speeds:
            speeds[running] = max(
                running / costs.plain.at(running),
                *(
                    running
                    * _chain_len(acceptance, depth)
                    / (
                        costs.verify.at(running * (1 + depth))
                        + cost.seconds(running, float(depth), float(running * depth))
                    )
                    for depth in _DEPTHS
                ),
            )
        total += (running + accepted) / speeds[running]
    return total


def _acceptance(accept_len: float) -> float:
    """Return the acceptance of each token for which a chain has this accept length."""
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        if _chain_len(middle, _MEASURED_DEPTHS) < accept_len:
            low = middle
        else:
            high = middle
    return high


def _chain_len(acceptance: float, depth: int) -> float:
    return expected_accept_len([acceptance] * depth)


PAYS_BELOW = 0.95
"""Share of the accept length in training below which further training is worth its time."""
PROBED_DEPTHS = 6
"""Depth to which a drafter is measured in training, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Acceptance of a drafter on new texts of the policy, and when it was trained.

    Example: Probe(accept_len=3.1, trained_accept_len=4.4, trained_on="base", num_tokens=512)
    """

    accept_len: float
    """Expected accept length of a chain; NaN if no text was long enough."""
    trained_accept_len: float | None
    """Expected accept length on held-out texts in training; None if unknown."""
    trained_on: str
    num_tokens: int

    @property
    def would_pay(self) -> bool:
        """Whether the drafter has lost enough acceptance that training it would pay."""
        known = self.trained_accept_len
        return known is not None and self.accept_len < PAYS_BELOW * known

    def lines(self, training: str) -> list[str]:
        """Return the log lines; `training` is the run's spot.train."""
        if math.isnan(self.accept_len):
            return []
        known = self.trained_accept_len
        then = "" if known is None else f", {known:.2f} where it was trained ({self.trained_on})"
        found = [
            f"drafter: expected accept length {self.accept_len:.2f} on {self.num_tokens} tokens of "
            f"this policy{then}"
        ]
        if self.would_pay:
            cure = {"never": "set spot.train = spot", "spot": "it is trained while workers idle"}
            found.append(
                "warning: the drafter has lost acceptance on this policy, so training it would "
                f"pay: {cure.get(training, 'it is trained after each rollout')}; or beforehand, "
                "with longtail drafter train --drafter.init"
            )
        return found


def probe(
    given: LoadedDrafter, engine: RolloutEngine, tokenizer: Tokenizer, requests: Sequence[Request]
) -> Probe:
    """Measure a drafter on texts that another engine generates with the policy of `engine`."""
    model = engine.model
    longest = max(len(each.prompt_tokens) + each.sampling.max_tokens for each in requests)
    limits = EngineLimits(max_running=len(requests), max_step_tokens=512, max_len=longest)
    completions = RolloutEngine(model, tokenizer.decode, limits).generate(requests)
    texts = [
        Example(tokens=request.prompt_tokens + done.tokens, prompt_len=len(request.prompt_tokens))
        for request, done in zip(requests, completions, strict=True)
    ]
    reader = DrafterTrainer(
        given.eagle, model, TrainerSettings(), draft_ids=given.draft_ids, head=given.head
    )
    depths = reader.evaluate(pack_texts(texts, limits.max_step_tokens), PROBED_DEPTHS)
    return Probe(
        accept_len=depths.accept_len if depths.overlap else math.nan,
        trained_accept_len=given.training.accept_len,
        trained_on=given.trained_on.name,
        num_tokens=sum(len(done.tokens) for done in completions),
    )
