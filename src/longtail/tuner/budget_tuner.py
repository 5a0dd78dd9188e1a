"""The default tuner. It predicts the gain of drafting, and drafts only where a gain is predicted.

    from time to time  compare drafting with plain decoding, and find the price of a node
    each step          verify the likeliest nodes, as many as yield most beyond their time's price
    after a step       keep a sample of recent drafts, and the ratio of accepted to expected nodes:
                       it detects a drafter that became worse sooner than single nodes do

Time is converted to tokens at the predicted rate: at `rate` tokens per second, s seconds cost
rate x s tokens. The N likeliest nodes are verified; N maximizes the sum of their probabilities less
the cost of their step, which is computed in blocks of rows: the last rows of a block are free. A
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
from itertools import combinations
from typing import final

import numpy as np
from jaxtyping import Float

from longtail.speculation.budget import Seconds, best_count, optimal_budget, select_nodes
from longtail.speculation.strategy import DraftThresholds, Strategy
from longtail.speculation.tree import DraftTree
from longtail.tuner.cost import CostModel
from longtail.tuner.messages import Batch, Outcome, Plan
from longtail.tuner.tuner import Tuner, merge_proposals

SHAPE = Strategy(depth=16, width=2, size=32, beam=1)
"""Largest draft."""
_PROBE_SHAPE = Strategy(depth=3, width=1, size=3, beam=1)
_PROBE_REQUESTS = 4
_START_GAIN, _STOP_GAIN = 1.02, 1.0
"""Predicted gains over plain decoding at which drafting starts and stops."""
_NEAR_GAIN = 0.9
"""Predicted gain after a probe from which the next one is soon."""
_CLEAR_GAIN = 2.0
"""Predicted gain above which plain steps are not needed."""
_DECISION_STEPS, _SHORT_DECISION_STEPS = 48, 6
"""Steps for which a decision holds; the second while estimates are new or the yield is low."""
_BATCH_CHANGE, _EARLY_CHANGE = 0.125, 0.5
"""Relative changes of the running requests that end a decision; the second while it is new."""
_LOW_YIELD = 0.75
"""Ratio of accepted to expected nodes that counts as low."""
_SAMPLE_REQUESTS, _SAMPLE_PER_STEP = 48, 16
"""Drafts in the sample, and the most that one step adds."""
_SAMPLE_INTERVAL = 4
"""Steps between two additions to the sample."""
_SAMPLE_RATE = 0.1
"""Rate of the moving average of draft depths."""
_PROBE_WAIT, _NEAR_PROBE_WAIT, _MAX_PROBE_WAIT = 32, 128, 1024
"""Steps from the end of drafting to the first probe, and the longest of the doubling waits: if
drafts nearly pay, and else."""
_PLAIN_INTERVAL = 128
"""Steps between plain steps while drafting, to correct the cost model."""
_ALL_DRAFTERS_INTERVAL = 64
"""Steps between proposals of all drafters; they also propose until each has a sample."""
_UNCUT_INTERVAL = 32
"""Steps between proposals without threshold, which calibrate unlikely nodes."""
_PROPOSE_SHARE = 0.6
"""Fraction of a node's cost at which it is proposed; which are verified is chosen when all are
known."""
_SPARE_SHARE = 0.5
"""Fraction of the verified nodes' least probability below which none is proposed. At 1 a better
drafter is found too late for law 9."""
_MAX_THRESHOLD = 0.95
"""Highest threshold of a node."""
_YIELD_PRIOR = 3.0
"""Weight of the initial yield 1, in nodes."""
_YIELD_DECAY, _PROBE_YIELD_DECAY = 0.97, 0.6
"""Factor of older nodes in the yield, per step and per probe."""
_SURPRISE = 1.5
"""Ratio of accepted to expected nodes at which a probe is repeated at once."""

PLAIN_PROBE = Plan(strategy=None, is_probe=True)
"""A plain step that does not end drafting."""

DrafterSet = tuple[int, ...]
"""Indices of drafters that propose together."""


@final
class _DraftSample:
    """Node probabilities of recent drafts; before the first, of a fairly good drafter."""

    def __init__(self) -> None:
        size = _SAMPLE_REQUESTS
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
        trees = trees[:_SAMPLE_PER_STEP]
        depths = [tree.depth for tree in trees]
        self.reach.extend(tree.reach for tree in trees)
        self.rows.extend(depths)
        self.levels += _SAMPLE_RATE * (max(depths) - self.levels)

    def sorted_reach(self) -> Float[np.ndarray, "nodes"]:
        """Return the probabilities of all nodes, highest first."""
        if self._sorted is None:
            self._sorted = -np.sort([-p for reach in self.reach for p in reach])
        return self._sorted


@dataclass(frozen=True, slots=True)
class _Budget:
    """Predicted best number of nodes with a set of drafters."""

    drafters: DrafterSet
    tokens_per_s: float
    num_nodes: int
    cutoff: float
    """Probability of the least likely of these nodes."""


class BudgetTuner(Tuner):
    """Decides by the cost model and by calibrated probabilities, with a guard beside it."""

    def begin(self, costs: CostModel | None, num_drafters: int) -> None:
        """Start with the estimate that every drafter is fairly good."""
        assert costs is not None, "the budget tuner needs measured costs"
        self._costs = costs
        self._all_drafters: DrafterSet = tuple(range(num_drafters))
        self._sets: list[DrafterSet] = [
            drafters
            for size in range(1, num_drafters + 1)
            for drafters in combinations(self._all_drafters, size)
        ]
        self._samples = {drafters: _DraftSample() for drafters in self._sets}
        self._drafting = True
        self._plan = Plan(strategy=SHAPE, drafters=self._all_drafters)
        self._gain, self._rate = 1.0, 0.0
        self._decided_for, self._age = 0, _DECISION_STEPS
        self._steps, self._since_plain = 0, 0
        self._waited, self._wait = 0, _PROBE_WAIT
        self._probed_for = 0
        """Requests that ran at the last probe."""
        self._expected = self._accepted = 0.0

    @property
    def _yield(self) -> float:
        """Ratio of recently accepted to expected nodes."""
        return (self._accepted + _YIELD_PRIOR) / (self._expected + _YIELD_PRIOR)

    def plan(self, batch: Batch) -> Plan:
        """Decide, or return the decision that still holds; from time to time, probe."""
        self._steps += 1
        self._age += 1
        if self._is_outdated(batch):
            self._decide(batch)
        if not self._drafting:
            self._waited += 1
            # Drafts pay the more, the fewer requests run.
            if self._waited < self._wait and 2 * batch.num_sampled > self._probed_for:
                return self._plan
            self._waited = -1  # its result is not known in the next step
            self._probed_for = batch.num_sampled
            return Plan(
                strategy=_PROBE_SHAPE,
                drafters=self._all_drafters,
                num_requests=_PROBE_REQUESTS,
                is_probe=True,
            )
        self._since_plain += 1
        if self._since_plain >= _PLAIN_INTERVAL and self._gain < _CLEAR_GAIN:
            self._since_plain = 0
            return PLAIN_PROBE
        if self._steps % _ALL_DRAFTERS_INTERVAL == 0 or self._steps < _SAMPLE_REQUESTS:
            return replace(self._plan, drafters=self._all_drafters)
        if self._steps % _UNCUT_INTERVAL == 0:
            return _uncut(self._plan)
        return self._plan

    def _is_outdated(self, batch: Batch) -> bool:
        """Return whether to decide anew: the decision is old, or the running requests changed."""
        is_stable = not self._drafting or (
            self._steps > _SAMPLE_REQUESTS and self._yield > _LOW_YIELD
        )
        if self._age > (_DECISION_STEPS if is_stable else _SHORT_DECISION_STEPS):
            return True
        limit = _BATCH_CHANGE if self._age > _SHORT_DECISION_STEPS else _EARLY_CHANGE
        return abs(batch.num_sampled - self._decided_for) > self._decided_for * limit

    def select_nodes(
        self, batch: Batch, plan: Plan, proposals: Sequence[Sequence[DraftTree]]
    ) -> list[DraftTree]:
        """Return the nodes that pay; of a probe, the likeliest."""
        trees = merge_proposals(proposals)
        if plan.is_probe or self._steps % _SAMPLE_INTERVAL == 0 or self._steps < _SAMPLE_REQUESTS:
            self._add_samples(plan, proposals, trees)
        if not plan.is_probe:
            return select_nodes(trees, self._count(batch, trees))
        most = max(batch.num_sampled, _PROBE_REQUESTS)  # in about twice the rows
        return select_nodes(trees, min(most, batch.room))

    def _add_samples(
        self, plan: Plan, proposals: Sequence[Sequence[DraftTree]], trees: Sequence[DraftTree]
    ) -> None:
        """Add a step's drafts to the sample of every set of drafters that proposed."""
        proposed = dict(zip(plan.drafters, proposals, strict=True))
        for drafters, sample in self._samples.items():
            if drafters == plan.drafters:
                sample.add(trees, is_probe=plan.is_probe)
            elif proposed.keys() >= set(drafters):
                own = merge_proposals([proposed[each] for each in drafters])
                sample.add(own, is_probe=plan.is_probe)

    def _count(self, batch: Batch, trees: Sequence[DraftTree]) -> int:
        """Return how many nodes of a step's drafts to verify."""
        nodes = (p for tree in trees for p in tree.reach or (1.0,) * tree.size)
        reach = min(self._yield, 1.0) * np.array(sorted(nodes, reverse=True)[: batch.room])
        return best_count(reach, self._rate, lambda num: self._costs.verify_each(batch, num))

    def learn(self, outcome: Outcome) -> None:
        """Update the yield; after a probe decide anew, and set the wait for the next one."""
        if not outcome.timings:
            return
        accepted, expected = outcome.num_accepted, outcome.num_expected
        is_surprise = accepted > max(1.0, _SURPRISE * min(self._yield, 1.0) * expected)
        decay = _PROBE_YIELD_DECAY if outcome.plan.is_probe else _YIELD_DECAY
        self._accepted = decay * self._accepted + accepted
        self._expected = decay * self._expected + expected
        if not outcome.plan.is_probe:
            return
        self._decide(outcome.batch)
        if not self._drafting:
            # A probe has few drafts: if they nearly pay, others may.
            most = _NEAR_PROBE_WAIT if self._gain > _NEAR_GAIN else _MAX_PROBE_WAIT
            longer = min(max(2 * self._wait, _PROBE_WAIT), most)
            self._wait = 1 if is_surprise else longer

    def reset_estimates(self) -> None:
        """Trust the drafters' confidences again, and probe in the next step."""
        self._expected = self._accepted = 0.0
        self._waited = self._wait = _PROBE_WAIT

    def _decide(self, batch: Batch) -> None:
        """Compare all sets of drafters with plain decoding.

        A prompt takes its time with any plan, so it must not lower the price of time.
        """
        batch = batch.decoding
        self._decided_for, self._age = batch.num_sampled, 0
        budgets = [self._best_budget(drafters, batch) for drafters in self._sets]
        best = max(budgets, key=lambda budget: budget.tokens_per_s)
        # The curves are corrected apart, but without nodes both kinds of step compute the same.
        plain_s = min(self._costs.plain_s(batch), self._costs.verify_s(batch, 0))
        plain = batch.num_sampled / plain_s
        self._gain = best.tokens_per_s / plain
        self._drafting = self._gain > (_STOP_GAIN if self._drafting else _START_GAIN)
        reason = f"predicted {self._gain:.2f}x of plain decoding at {batch.num_sampled} running"
        if self._drafting:
            self._rate = best.tokens_per_s
            strategy = replace(SHAPE, thresholds=self._thresholds(best, batch))
            self._plan = Plan(strategy=strategy, drafters=best.drafters, reason=reason)
            self._waited, self._wait = 0, _PROBE_WAIT
        else:
            self._plan = Plan(strategy=None, reason=reason)

    def _best_budget(self, drafters: DrafterSet, batch: Batch) -> _Budget:
        """Find the best budget for the sample of drafts, scaled to the batch."""
        sample = self._samples[drafters]
        scale = batch.num_draftable / max(len(sample.reach), 1)
        reach = sample.sorted_reach()[: max(int(batch.room / scale), 1)]
        reach = reach * min(self._yield, 1.0)
        seconds = self._seconds(drafters, batch)
        num, tokens_per_s = optimal_budget(reach, scale, batch.num_sampled, seconds)
        cutoff = float(reach[num - 1]) if num else 1.0
        return _Budget(drafters, tokens_per_s, int(num * scale), cutoff)

    def _seconds(self, drafters: DrafterSet, batch: Batch) -> Seconds:
        """Return a prediction of the step's seconds by its number of verified nodes."""
        costs, num, draft_s = self._costs, batch.num_draftable, 0.0
        for each in drafters:
            own = self._samples[each,]
            rows = num * sum(own.rows) / max(len(own.rows), 1)
            draft_s += costs.drafts[each].seconds(num, own.levels, rows)
        return lambda nodes: draft_s + costs.verify_each(batch, nodes)

    def _thresholds(self, best: _Budget, batch: Batch) -> DraftThresholds:
        """Convert the costs of nodes, rows and passes to probabilities at the predicted rate."""
        price = best.tokens_per_s * self._costs.node_s(batch, best.num_nodes)
        price = max(price, _SPARE_SHARE * best.cutoff)  # unlikelier nodes are not verified
        drafts = [self._costs.drafts[drafter] for drafter in best.drafters]
        row = best.tokens_per_s * max(draft.row_s for draft in drafts)
        level = best.tokens_per_s * max(draft.level_s for draft in drafts)
        return DraftThresholds(
            verify=min(_PROPOSE_SHARE * price, _MAX_THRESHOLD),
            expand=min(price + row, _MAX_THRESHOLD),
            level=level,
        )


def _uncut(plan: Plan) -> Plan:
    """Return the plan without a threshold for proposals: every node found is proposed."""
    assert plan.strategy is not None, "only a plan that drafts"
    thresholds = replace(plan.strategy.thresholds, verify=0.0)
    return replace(plan, strategy=replace(plan.strategy, thresholds=thresholds))
