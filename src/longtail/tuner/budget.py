"""The default tuner: everything is predicted, nothing is tried that is not expected to pay.

    now and then      do drafts pay at all, whose, from what probability on is a node worth it
    each step         `speculation.budget`: nodes are bought at that price
    after the step    the cost model and the drafters' confidences have learned; what is kept here
                      is a sample of the latest drafts, and how much of what was expected came:
                      a drafter that goes bad is noticed sooner so than node by node

Time is priced at the rate that is reached anyway: with `rate` tokens a second, s seconds are worth
rate x s tokens. So a node is worth verifying if it is reached with a probability over rate x (its
share of the verification), worth drafting on if it also pays its row of the drafter's next pass,
and another pass is made if all that is gained by it pays what a pass costs by itself. A node's
descendants are never likelier than it, so what does not pay now does not pay later.

Roads not taken are looked at now and then, so that what is believed of them stays true: a draft for
a few requests while decoding plainly (again at once if it did well, ever more rarely if not), a
plain step while drafting, all drafters where one is preferred.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import final

import numpy as np
from jaxtyping import Float

from longtail.speculation.budget import Seconds, optimal_budget, select_nodes
from longtail.speculation.strategy import DraftThresholds, Strategy
from longtail.speculation.tree import DraftTree
from longtail.tuner.cost import CostModel
from longtail.tuner.records import Batch, Outcome, Plan
from longtail.tuner.tuner import Tuner, merge_proposals

SHAPE = Strategy(depth=16, width=2, size=32, beam=1)
"""The largest draft; what is worth it is decided node by node."""
_ON, _OFF = 1.02, 0.99
"""Predicted gains over plain decoding from which drafting begins, and below which it ends."""
_LIFE, _SHORT_LIFE = 48, 6
"""Steps for which a decision holds while the batch stays about as large; the second while little
is known, and while drafts do worse than expected."""
_HASTE = 4
"""Times as great a change of the batch that makes a young decision void."""
_UNLUCKY = 0.75
_SAMPLES, _A_STEP, _SAMPLED_EVERY = 48, 16, 4
"""Requests whose latest drafts are remembered, how many of one step, and of which steps."""
_PROBE, _FEW = replace(SHAPE, depth=3, size=3, width=1), 4
"""A look at drafting while decoding plainly, and for how many requests."""
_WAIT, _LONGEST_WAIT = 32, 1024
_HOLDS = 7
"""Plain steps that follow one without a question. What they take is learned of one in eight."""
_PLAIN_EVERY, _ALL_EVERY, _UNCUT_EVERY = 128, 192, 32
_LENIENT, _SUREST = 0.6, 0.95
"""Nodes are proposed from this share of what they cost on: which of them are verified is decided
when all are known. Nothing is asked to be surer than _SUREST."""
_CLEAR = 2.0
"""With a predicted gain over this, how quick plain decoding is makes no difference."""

ASIDE = Plan(strategy=None, is_probe=True)
"""A plain step that is no change of mind."""

_PRIOR = 3.0
_FADES, _FADES_AT_A_LOOK = 0.97, 0.6
"""Share of the weight that what came and what was expected keep from draft to draft; looks are few
and small, and what was before them is long ago."""
_SURPRISE = 1.5
"""A look at drafting that gave so many times what was expected is followed by another at once."""

Team = tuple[int, ...]


@dataclass(slots=True)
class _Sample:
    """Likelihoods of the nodes of some drafts; at first those of a fairly good drafter."""

    reach: deque[tuple[float, ...]] = field(
        default_factory=lambda: deque([tuple(0.85**d for d in range(1, 7))], maxlen=_SAMPLES)
    )
    rows: deque[int] = field(default_factory=lambda: deque([6], maxlen=_SAMPLES))
    levels: float = 6.0
    is_guess: bool = True
    _falling: Float[np.ndarray, "nodes"] | None = None

    def add(self, trees: Sequence[DraftTree], *, afresh: bool) -> None:
        """Remember some of a step's drafts."""
        self._falling = None
        if self.is_guess or afresh:
            self.reach.clear()
            self.rows.clear()
            self.is_guess = False
        deep = [tree.depth for tree in trees[:_A_STEP]]
        self.reach.extend(tree.reach for tree in trees[:_A_STEP])
        self.rows.extend(deep)
        self.levels += 0.1 * (max(deep) - self.levels)

    def falling(self) -> Float[np.ndarray, "nodes"]:
        """Return the probabilities of all nodes, from the highest on."""
        if self._falling is None:
            self._falling = np.array([-p for reach in self.reach for p in reach])
            self._falling.sort()
            np.negative(self._falling, out=self._falling)
        return self._falling


@dataclass(frozen=True, slots=True, kw_only=True)
class _Forecast:
    """What drafting by a team is expected to give."""

    team: Team
    tokens_per_s: float
    num_nodes: int


@final
class BudgetTuner(Tuner):
    """Decides by the cost model and by calibrated probabilities."""

    @property
    def needs_costs(self) -> bool:
        """It does nothing without."""
        return True

    def begin(self, costs: CostModel | None, num_drafters: int) -> None:
        """Expect every drafter to be fairly good."""
        assert costs is not None, "the budget is paid for by measured time"
        self._costs = costs
        everyone = tuple(range(num_drafters))
        teams: list[Team] = [(drafter,) for drafter in everyone]
        self._teams = teams if num_drafters == 1 else [*teams, everyone]
        self._samples = {team: _Sample() for team in self._teams}
        self._drafting = True
        self._plan = Plan(strategy=SHAPE, drafters=self._teams[-1])
        self._gain, self._price = 1.0, 0.0
        self._decided_for, self._age = 0, _LIFE
        self._steps, self._since_plain = 0, 0
        self._waited, self._wait = 0, _WAIT
        self._expected = self._came = 0.0

    @property
    def _luck(self) -> float:
        """What came of drafts lately, by what was expected."""
        return (self._came + _PRIOR) / (self._expected + _PRIOR)

    def plan(self, batch: Batch) -> Plan:
        """Decide, or go by a decision that still holds; now and then, look elsewhere."""
        if not batch.num_draftable or not batch.room:
            return ASIDE
        self._steps += 1
        self._age += 1
        if self._is_void(batch):
            self._decide(batch)
        if not self._drafting:
            self._waited += 1 + _HOLDS
            if self._waited < self._wait:
                return self._plan
            self._waited = -(1 + _HOLDS)  # what it finds is not known in the next step
            everyone = self._teams[-1]
            return Plan(strategy=_PROBE, drafters=everyone, num_requests=_FEW, is_probe=True)
        self._since_plain += 1
        if self._since_plain >= _PLAIN_EVERY and self._gain < _CLEAR:
            self._since_plain = 0
            return ASIDE
        if self._steps % _ALL_EVERY == 0:
            return replace(self._plan, drafters=self._teams[-1])
        if self._steps % _UNCUT_EVERY == 0:
            return _uncut(self._plan)
        return self._plan

    def _is_void(self, batch: Batch) -> bool:
        """Tell whether it is to be decided anew; of a step that reads prompts only if it must."""
        settled = not self._drafting or (self._steps > _SAMPLES and self._luck > _UNLUCKY)
        if self._age > (_LIFE if settled else _SHORT_LIFE):
            return True
        haste = 1 if self._age > _SHORT_LIFE else _HASTE
        changed = abs(batch.num_sampled - self._decided_for) * 8 > self._decided_for * haste
        return changed and batch.num_tokens == batch.num_sampled

    def select_nodes(
        self, batch: Batch, plan: Plan, proposals: Sequence[Sequence[DraftTree]]
    ) -> list[DraftTree]:
        """Verify what pays; of a look at drafting everything, since it is meant to teach."""
        trees = merge_proposals(proposals)
        if plan.is_probe or self._steps % _SAMPLED_EVERY == 0 or self._steps < _SAMPLES:
            for drafter, own in zip(plan.drafters, proposals, strict=True):
                self._samples[drafter,].add(own, afresh=plan.is_probe)
            if len(proposals) > 1:
                self._samples[plan.drafters].add(trees, afresh=plan.is_probe)
        return select_nodes(trees, 0.0 if plan.is_probe else self._price, batch.room)

    def learn(self, outcome: Outcome) -> None:
        """Go by a look at drafting that did well; look less often after one that did not."""
        if not outcome.timings:
            return
        came, expected = outcome.num_accepted, outcome.num_expected
        again = came > max(1.0, _SURPRISE * min(self._luck, 1.0) * expected)
        fades = _FADES_AT_A_LOOK if outcome.plan.is_probe else _FADES
        self._came = fades * self._came + came
        self._expected = fades * self._expected + expected
        if not outcome.plan.is_probe:
            return
        self._decide(outcome.batch)
        if not self._drafting:
            self._wait = 1 if again else min(max(2 * self._wait, _WAIT), _LONGEST_WAIT)

    def reset_estimates(self) -> None:
        """Expect of the drafts what their confidences say, and look at drafting at once."""
        self._expected = self._came = 0.0
        self._waited = self._wait = _WAIT

    def _decide(self, batch: Batch) -> None:
        """Compare all teams with plain decoding."""
        self._decided_for, self._age = batch.num_sampled, 0
        forecasts = [self._forecast(team, batch) for team in self._teams]
        best = max(forecasts, key=lambda forecast: forecast.tokens_per_s)
        plain = batch.num_sampled / self._costs.plain_s(batch)
        self._gain = best.tokens_per_s / plain
        self._drafting = self._gain > (_OFF if self._drafting else _ON)
        reason = f"predicted {self._gain:.2f}x of plain decoding at {batch.num_sampled} running"
        if self._drafting:
            self._price = best.tokens_per_s * self._costs.node_s(batch, best.num_nodes)
            thresholds = self._worth(best)
            strategy = replace(SHAPE, thresholds=thresholds)
            self._plan = Plan(strategy=strategy, drafters=best.team, reason=reason)
            self._waited, self._wait = 0, _WAIT
        else:
            self._plan = Plan(strategy=None, reason=reason, repeat_steps=_HOLDS)

    def _forecast(self, team: Team, batch: Batch) -> _Forecast:
        """Spend the budget on a sample of drafts, as if it were the whole batch's."""
        sample = self._samples[team]
        scale = batch.num_draftable / max(len(sample.reach), 1)
        falling = sample.falling()[: max(int(batch.room / scale), 1)]
        falling = falling * min(self._luck, 1.0)
        found = optimal_budget(falling, scale, batch.num_sampled, self._seconds(team, batch))
        return _Forecast(
            team=team,
            tokens_per_s=found.tokens_per_s,
            num_nodes=int(found.num_nodes * scale),
        )

    def _seconds(self, team: Team, batch: Batch) -> Seconds:
        """Predict a step with drafts of the team, by the number of nodes that are verified."""
        sample, costs, num = self._samples[team], self._costs, batch.num_draftable
        rows = num * sum(sample.rows) / max(len(sample.rows), 1)
        sunk = sum(costs.drafts[each].seconds(num, sample.levels, rows) for each in team)
        return lambda nodes: sunk + costs.verify_each(batch, nodes)

    def _worth(self, best: _Forecast) -> DraftThresholds:
        """Price nodes, rows and passes at the rate that is expected."""
        drafts = [self._costs.drafts[drafter] for drafter in best.team]
        node = self._price
        row = best.tokens_per_s * max(draft.row_s for draft in drafts)
        level = best.tokens_per_s * max(draft.level_s for draft in drafts)
        return DraftThresholds(
            verify=min(_LENIENT * node, _SUREST), expand=min(node + row, _SUREST), level=level
        )


def _uncut(plan: Plan) -> Plan:
    """Have everything proposed that is come across, so that it is learned how likely it is."""
    assert plan.strategy is not None, "only a plan that drafts"
    thresholds = replace(plan.strategy.thresholds, verify=0.0)
    return replace(plan, strategy=replace(plan.strategy, thresholds=thresholds))
