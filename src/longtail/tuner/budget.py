"""The default tuner. It predicts the gain of drafting, and drafts only where a gain is predicted.

    from time to time  compare drafting with plain decoding, and find the price of a node
    each step          verify the likeliest nodes, as many as yield most beyond their time's price
    after a step       keep a sample of recent drafts, and the ratio of accepted to expected nodes:
                       it detects a drafter that became worse sooner than single nodes do

Time is converted to tokens at the predicted rate: at `rate` tokens per second, s seconds cost
rate x s tokens. The likeliest N nodes are verified, with the N whose probabilities exceed the cost
of their step most: a step computes rows in blocks, so that the last rows of a block are free. A
node is proposed if it pays for the mean cost of the last nodes and is likely enough to be among
them, and expanded if it also pays for its row of the drafter's next pass. Another pass is made if
its nodes together pay for the pass. A descendant is never likelier than its ancestors, so nothing
below a node that does not pay can pay.

Alternatives are probed from time to time so that their estimates stay valid: a few drafts while
decoding plainly, a plain step while drafting, all drafters while one of them is preferred.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import numpy as np
from jaxtyping import Float

from longtail.speculation.budget import Seconds, best_count, optimal_budget, select_nodes
from longtail.speculation.strategy import DraftThresholds, Strategy
from longtail.speculation.tree import DraftTree
from longtail.tuner.cost import CostModel
from longtail.tuner.records import Batch, Outcome, Plan
from longtail.tuner.tuner import Tuner, merge_proposals

SHAPE = Strategy(depth=16, width=2, size=32, beam=1)
_PROBE_SHAPE = Strategy(depth=3, width=1, size=3, beam=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetConstants:
    """Constants of the budget tuner.

    Each docstring gives the unit, and the effect of half and double: the change of the time lost
    against the best fixed chain, in percentage points, on the simulated engine of the tests (two
    seeds; changes below 0.5 are noise and called "none"). "Worse" is the loss of 9.6 in 400 steps
    after a drafter became useless, "better" that of 5.1 in 800 steps after it became good again.
    The latter depends on when a probe happens, so its large values are single late probes.
    """

    shape: Strategy = SHAPE
    """Largest draft. Half (8 levels, 16 nodes): worse -1.2, better +1.3. Double: worse +0.7."""
    probe_shape: Strategy = _PROBE_SHAPE
    """Drafts of a probe. Half, double: none."""
    start_gain: float = 1.02
    """Predicted gain over plain decoding to start drafting. Half, double the excess: none."""
    stop_gain: float = 1.0
    """Predicted gain below which drafting stops. At 0.98 or 0.995: none, but a drafter without
    proposals then costs that share."""
    decision_steps: int = 48
    """Steps for which a decision holds. Half: none. Double: better +18."""
    short_decision_steps: int = 6
    """The same while estimates are new or the yield is low. Half: better +1.0. Double: none."""
    batch_change: float = 0.125
    """Relative change of the running requests that ends a decision. Half, double: none."""
    early_change_factor: float = 4.0
    """Factor of `batch_change` in the first `short_decision_steps`. Half, double: none."""
    low_yield: float = 0.75
    """Ratio of accepted to expected nodes that counts as low. Half: worse +1.3. Double: none
    (worse +0.5, better +0.6)."""
    sample_requests: int = 48
    """Drafts in the sample. Half: better -0.7. Double: worse +0.5, better -0.8."""
    sample_per_step: int = 16
    """Drafts that one step adds to the sample. Half, double: none."""
    sample_interval: int = 4
    """Steps between two additions. Half, double: none, but the host's time grows with half."""
    sample_rate: float = 0.1
    """Rate of the moving average of draft depths. Half: better +0.9. Double: better +0.8."""
    probe_requests: int = 4
    """Requests in a probe. Half: none. Double: better +0.7."""
    probe_wait: int = 32
    """Steps from the end of drafting to the first probe. Half: none. Double: better +34."""
    max_probe_wait: int = 1024
    """Maximum of the doubling wait between probes, in steps. Half: better -5. Double: none."""
    repeat_steps: int = 7
    """Repetitions of a planned plain step. Half: better +0.7. Double: better +0.9."""
    plain_interval: int = 128
    """Steps between plain steps while drafting, to correct the cost model. Half: better -0.9.
    Double: none."""
    clear_gain: float = 2.0
    """Predicted gain above which plain steps are not needed. Half, double: none."""
    all_drafters_interval: int = 192
    """Steps between proposals of all drafters; not used with one drafter, so not measured."""
    uncut_interval: int = 32
    """Steps between proposals without threshold, which calibrate unlikely nodes. Half, double:
    none."""
    propose_share: float = 0.6
    """Share of a node's cost at which it is proposed; which nodes are verified is chosen when all
    are known. Half, double (at most 1): none."""
    spare_share: float = 0.5
    """Share of the verified nodes' least probability below which none is proposed. Double: a better
    drafter is found too late for law 9. Half was not measured."""
    max_threshold: float = 0.95
    """Highest threshold of a node. Half: steady loss +0.6, worse +1.2. At 1: none."""
    yield_prior: float = 3.0
    """Weight of the initial yield 1, in nodes. Half: none. Double: better +0.5."""
    yield_decay: float = 0.97
    """Factor of older nodes in the yield, per step. Half the memory (0.94): worse -2.8, better +34.
    Double (0.985): worse +5.9, better +0.5."""
    probe_yield_decay: float = 0.6
    """The same per probe. Half the memory (0.2): better +0.6. Double (0.8): none."""
    surprise: float = 1.5
    """Ratio of accepted to expected nodes at which a probe is repeated at once. Half: steady loss
    +0.7, and 1.0 while a batch shrinks. Double: none."""


PLAIN_PROBE = Plan(strategy=None, is_probe=True)
"""A plain step that does not end drafting."""

DrafterSet = tuple[int, ...]
"""Indices of drafters that propose together."""


@final
class _DraftSample:
    """Node probabilities of recent drafts; before the first, of a fairly good drafter."""

    def __init__(self, constants: BudgetConstants) -> None:
        self._constants = constants
        size = constants.sample_requests
        self.reach: deque[tuple[float, ...]] = deque([tuple(0.85**d for d in range(1, 7))], size)
        self.rows: deque[int] = deque([6], size)
        self.levels = 6.0
        self._is_prior = True
        self._sorted: Float[np.ndarray, "nodes"] | None = None

    def add(self, trees: Sequence[DraftTree], *, is_probe: bool) -> None:
        """Remember some drafts of a step; those of a probe replace all earlier ones."""
        self._sorted = None
        if self._is_prior or is_probe:
            self.reach.clear()
            self.rows.clear()
            self._is_prior = False
        trees = trees[: self._constants.sample_per_step]
        depths = [tree.depth for tree in trees]
        self.reach.extend(tree.reach for tree in trees)
        self.rows.extend(depths)
        self.levels += self._constants.sample_rate * (max(depths) - self.levels)

    def sorted_reach(self) -> Float[np.ndarray, "nodes"]:
        """Return the probabilities of all nodes, highest first."""
        if self._sorted is None:
            self._sorted = np.array([-p for reach in self.reach for p in reach])
            self._sorted.sort()
            np.negative(self._sorted, out=self._sorted)
        return self._sorted


@dataclass(frozen=True, slots=True)
class _Forecast:
    """Predicted result of drafting with a set of drafters."""

    drafters: DrafterSet
    tokens_per_s: float
    num_nodes: int
    cutoff: float
    """Probability of the least likely of these nodes."""


@final
class BudgetTuner(Tuner):
    """Decides by the cost model and by calibrated probabilities."""

    def __init__(self, constants: BudgetConstants = BudgetConstants()) -> None:
        self._constants = constants

    @property
    def needs_costs(self) -> bool:
        """True."""
        return True

    def begin(self, costs: CostModel | None, num_drafters: int) -> None:
        """Start with the estimate that every drafter is fairly good."""
        assert costs is not None, "the budget tuner needs measured costs"
        c = self._constants
        self._costs = costs
        self._all_drafters: DrafterSet = tuple(range(num_drafters))
        self._sets: list[DrafterSet] = [(drafter,) for drafter in self._all_drafters]
        if num_drafters > 1:
            self._sets.append(self._all_drafters)
        self._samples = {drafters: _DraftSample(c) for drafters in self._sets}
        self._drafting = True
        self._plan = Plan(strategy=c.shape, drafters=self._all_drafters)
        self._gain, self._rate = 1.0, 0.0
        self._decided_for, self._age = 0, c.decision_steps
        self._steps, self._since_plain = 0, 0
        self._waited, self._wait = 0, c.probe_wait
        self._expected = self._accepted = 0.0

    @property
    def _yield(self) -> float:
        """Ratio of recently accepted to expected nodes."""
        prior = self._constants.yield_prior
        return (self._accepted + prior) / (self._expected + prior)

    def plan(self, batch: Batch) -> Plan:
        """Decide, or return the decision that still holds; from time to time, probe."""
        if not batch.num_draftable or not batch.room:
            return PLAIN_PROBE
        c = self._constants
        self._steps += 1
        self._age += 1
        if self._is_outdated(batch):
            self._decide(batch)
        if not self._drafting:
            self._waited += 1 + c.repeat_steps
            if self._waited < self._wait:
                return self._plan
            self._waited = -(1 + c.repeat_steps)  # its result is not known in the next step
            return Plan(
                strategy=c.probe_shape,
                drafters=self._all_drafters,
                num_requests=c.probe_requests,
                is_probe=True,
            )
        self._since_plain += 1
        if self._since_plain >= c.plain_interval and self._gain < c.clear_gain:
            self._since_plain = 0
            return PLAIN_PROBE
        if self._steps % c.all_drafters_interval == 0:
            return replace(self._plan, drafters=self._all_drafters)
        if self._steps % c.uncut_interval == 0:
            return _uncut(self._plan)
        return self._plan

    def _is_outdated(self, batch: Batch) -> bool:
        """Return whether to decide anew; in a step that reads prompts, only by age."""
        c = self._constants
        is_stable = not self._drafting or (
            self._steps > c.sample_requests and self._yield > c.low_yield
        )
        if self._age > (c.decision_steps if is_stable else c.short_decision_steps):
            return True
        factor = 1.0 if self._age > c.short_decision_steps else c.early_change_factor
        change = abs(batch.num_sampled - self._decided_for)
        is_changed = change > self._decided_for * c.batch_change * factor
        return is_changed and batch.num_tokens == batch.num_sampled

    def select_nodes(
        self, batch: Batch, plan: Plan, proposals: Sequence[Sequence[DraftTree]]
    ) -> list[DraftTree]:
        """Return the nodes that pay; of a probe all nodes."""
        c = self._constants
        trees = merge_proposals(proposals)
        if plan.is_probe or self._steps % c.sample_interval == 0 or self._steps < c.sample_requests:
            for drafter, own in zip(plan.drafters, proposals, strict=True):
                self._samples[drafter,].add(own, is_probe=plan.is_probe)
            if len(proposals) > 1:
                self._samples[plan.drafters].add(trees, is_probe=plan.is_probe)
        return select_nodes(trees, 0.0, batch.room if plan.is_probe else self._count(batch, trees))

    def _count(self, batch: Batch, trees: Sequence[DraftTree]) -> int:
        """Return how many nodes of a step's drafts to verify."""
        nodes = (p for tree in trees for p in tree.reach or (1.0,) * tree.size)
        reach = min(self._yield, 1.0) * np.array(sorted(nodes, reverse=True)[: batch.room])
        return best_count(reach, self._rate, lambda num: self._costs.verify_each(batch, num))

    def learn(self, outcome: Outcome) -> None:
        """Update the yield; after a probe decide anew, and set the wait for the next one."""
        if not outcome.timings:
            return
        c = self._constants
        accepted, expected = outcome.num_accepted, outcome.num_expected
        is_surprise = accepted > max(1.0, c.surprise * min(self._yield, 1.0) * expected)
        decay = c.probe_yield_decay if outcome.plan.is_probe else c.yield_decay
        self._accepted = decay * self._accepted + accepted
        self._expected = decay * self._expected + expected
        if not outcome.plan.is_probe:
            return
        self._decide(outcome.batch)
        if not self._drafting:
            longer = min(max(2 * self._wait, c.probe_wait), c.max_probe_wait)
            self._wait = 1 if is_surprise else longer

    def reset_estimates(self) -> None:
        """Trust the drafters' confidences again, and probe in the next step."""
        self._expected = self._accepted = 0.0
        self._waited = self._wait = self._constants.probe_wait

    def _decide(self, batch: Batch) -> None:
        """Compare all sets of drafters with plain decoding."""
        c = self._constants
        self._decided_for, self._age = batch.num_sampled, 0
        forecasts = [self._forecast(drafters, batch) for drafters in self._sets]
        best = max(forecasts, key=lambda forecast: forecast.tokens_per_s)
        # The curves are corrected apart, but without nodes both kinds of step compute the same.
        plain_s = min(self._costs.plain_s(batch), self._costs.verify_s(batch, 0))
        plain = batch.num_sampled / plain_s
        self._gain = best.tokens_per_s / plain
        self._drafting = self._gain > (c.stop_gain if self._drafting else c.start_gain)
        reason = f"predicted {self._gain:.2f}x of plain decoding at {batch.num_sampled} running"
        if self._drafting:
            self._rate = best.tokens_per_s
            strategy = replace(c.shape, thresholds=self._thresholds(best, batch))
            self._plan = Plan(strategy=strategy, drafters=best.drafters, reason=reason)
            self._waited, self._wait = 0, c.probe_wait
        else:
            self._plan = Plan(strategy=None, reason=reason, repeat_steps=c.repeat_steps)

    def _forecast(self, drafters: DrafterSet, batch: Batch) -> _Forecast:
        """Find the best budget for the sample of drafts, scaled to the batch."""
        sample = self._samples[drafters]
        scale = batch.num_draftable / max(len(sample.reach), 1)
        reach = sample.sorted_reach()[: max(int(batch.room / scale), 1)]
        reach = reach * min(self._yield, 1.0)
        budget = optimal_budget(reach, scale, batch.num_sampled, self._seconds(drafters, batch))
        cutoff = float(reach[budget.num_nodes - 1]) if budget.num_nodes else 1.0
        return _Forecast(drafters, budget.tokens_per_s, int(budget.num_nodes * scale), cutoff)

    def _seconds(self, drafters: DrafterSet, batch: Batch) -> Seconds:
        """Return a prediction of the step's seconds by its number of verified nodes."""
        sample, costs, num = self._samples[drafters], self._costs, batch.num_draftable
        rows = num * sum(sample.rows) / max(len(sample.rows), 1)
        draft_s = sum(costs.drafts[each].seconds(num, sample.levels, rows) for each in drafters)
        return lambda nodes: draft_s + costs.verify_each(batch, nodes)

    def _thresholds(self, best: _Forecast, batch: Batch) -> DraftThresholds:
        """Convert the costs of nodes, rows and passes to probabilities at the predicted rate."""
        c = self._constants
        price = best.tokens_per_s * self._costs.node_s(batch, best.num_nodes)
        price = max(price, c.spare_share * best.cutoff)  # unlikelier nodes are not verified
        drafts = [self._costs.drafts[drafter] for drafter in best.drafters]
        row = best.tokens_per_s * max(draft.row_s for draft in drafts)
        level = best.tokens_per_s * max(draft.level_s for draft in drafts)
        return DraftThresholds(
            verify=min(c.propose_share * price, c.max_threshold),
            expand=min(price + row, c.max_threshold),
            level=level,
        )


def _uncut(plan: Plan) -> Plan:
    """Return the plan without a threshold for proposals: every node found is proposed."""
    assert plan.strategy is not None, "only a plan that drafts"
    thresholds = replace(plan.strategy.thresholds, verify=0.0)
    return replace(plan, strategy=replace(plan.strategy, thresholds=thresholds))
