"""`longtail bench tuner`: its ratios, its contestants and its card."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import final

import pytest
from jaxtyping import Float
from torch import Tensor

from longtail.bench.common.timing import Spread
from longtail.bench.rollout.subjects import Subject
from longtail.bench.tuner import card
from longtail.bench.tuner.drafters import SpoilingDrafter, maker
from longtail.bench.tuner.measure import BANDIT, BUDGET, OFF, Point, Race, lineup, sweep
from longtail.bench.tuner.options import TunerBenchOptions
from longtail.bench.tuner.rollout import (
    ORACLE,
    OracleTuner,
    Rollouts,
    measure_rollouts,
    oracle_table,
)
from longtail.engine.rollout_log import RolloutSeries
from longtail.speculation.drafter import Draftable, Drafter, Noise, Observed
from longtail.speculation.strategy import Strategy
from longtail.speculation.taps import NO_TAPS, Taps
from longtail.speculation.tree import DraftTree
from longtail.speculation.verify import Accepted
from longtail.tuner.records import Batch
from longtail.tuner.tuner import PLAIN
from longtail.types import SamplingParams
from support.fakes import scripted_model, unchecked_shapes

OPTIONS = TunerBenchOptions(quick=True)
DEEP, SHALLOW = Strategy(depth=8, size=8), Strategy(depth=2, size=2)
SERIES = RolloutSeries(
    seconds=(0.25,), running=(4,), drafts=(0,), nodes=(0,), accepted=(0,), readings=(), switches=()
)
STRATEGIES = {"chain 8": DEEP, "chain 2": SHALLOW}
RACE = Race(
    speeds={
        OFF: (100.0, 80.0, 100.0),
        "chain 8": (400.0, 100.0, 110.0),  # lucky once
        "chain 2": (150.0, 120.0, 200.0),
        BANDIT: (120.0, 96.0, 130.0),
        BUDGET: (180.0, 132.0, 190.0),
        ORACLE: (200.0, 165.0, 190.0),
    },
    fixed=("chain 8", "chain 2"),
)


def point(drafter: str, running: int, **speeds: float) -> Point:
    """One turn of each: off 100, chain 8 at 200, chain 2 at 150, unless said otherwise."""
    known = {OFF: 100.0, "chain 8": 200.0, "chain 2": 150.0, BANDIT: 120.0, BUDGET: 190.0}
    known |= {name.replace("_", " "): speed for name, speed in speeds.items()}
    return Point(
        drafter=drafter,
        running=running,
        race=Race(speeds={name: (speed,) for name, speed in known.items()}, fixed=RACE.fixed),
        strategies=STRATEGIES,
        scanned={"chain 8": 210.0},
        accept_length=dict.fromkeys(known, 2.5),
        tuner_share=running / 1000,
        differing_share=0.0,
        lowest_cpu_share=0.99,
    )


def rollouts() -> Rollouts:
    second = Spread(median=1.0, low=1.0, high=1.0)
    return Rollouts(
        race=RACE,
        seconds=dict.fromkeys(RACE.speeds, second),
        accept_length=dict.fromkeys(RACE.speeds, 2.5),
        tail_idle_share=dict.fromkeys(RACE.speeds, 0.4),
        tuner_share=0.004,
        differing_share=0.0,
        lowest_cpu_share=0.5,
        oracle={1: "chain 8", 64: OFF},
        series=SERIES,
    )


def test_the_best_fixed_strategy_is_the_best_median_not_the_luckiest_turn() -> None:
    assert RACE.best_fixed == "chain 2"  # medians 150 and 110
    assert RACE.best == "chain 2"
    slow = replace(RACE, speeds={**RACE.speeds, "chain 2": (90.0,) * 3, "chain 8": (70.0,) * 3})
    assert (slow.best_fixed, slow.best) == ("chain 2", OFF)


def test_ratios_and_regrets_are_taken_within_each_turn() -> None:
    assert RACE.ratio(BUDGET, OFF) == Spread(median=1.8, low=1.65, high=1.9)
    regret = RACE.regret(BUDGET, ORACLE)  # 180/200, 132/165, 190/190
    assert (regret.median, regret.low, regret.high) == pytest.approx((0.1, 0.0, 0.2))


def test_the_headline_is_the_worst_point_of_the_useful_drafters() -> None:
    points = [
        point("good", 32),  # 190/200
        point("good", 64, budget=220.0),
        point("mediocre", 1, budget=96.0, chain_8=80.0, chain_2=90.0),  # of fixed 1.07, of off 0.96
        point("adversarial", 1, budget=97.0, chain_8=10.0, chain_2=20.0),
        point("adversarial", 64, budget=99.0),
    ]
    found = card.headline(points, rollouts())
    medians = {name: spread.median for name, spread in found.items() if spread is not None}
    assert medians == pytest.approx(
        {
            "worst_vs_best_fixed": 0.95,
            "worst_vs_best": 0.95,
            "adversarial_vs_off": 0.97,
            "speedup_32": 1.9,
            "speedup_64": 2.2,
            "rollout_vs_best_fixed": 1.1,  # of 180/150, 132/120, 190/200
            "rollout_speedup": 1.8,
            "vs_beg_mab": 190 / 130,  # of 1.5, 1.375, 1.46
        }
    )
    lost = card.headline(points[2:3], None)
    assert lost["worst_vs_best_fixed"] == Spread.of([96 / 90])
    assert lost["worst_vs_best"] == Spread.of([0.96])


def test_json_holds_medians_and_null_where_nothing_was_measured() -> None:
    points = [point("good", 32), point("mediocre", 8)]
    whole = card.as_json(OPTIONS, [0], points, rollouts())
    again = json.loads(json.dumps(whole))
    assert again["speedup_32"] == 1.9
    assert again["speedup_64"] is None
    assert again["adversarial_vs_off"] is None
    assert again["regret"] == pytest.approx({"budget": 0.1, "beg_mab": 0.4})
    assert again["tuner_share"] == 0.032
    assert again["lowest_cpu_share"] == 0.5
    assert again["spreads"]["rollout_speedup"] == {"median": 1.8, "low": 1.65, "high": 1.9}
    assert again["points"][0]["race"]["speeds"]["budget"] == [190.0]
    assert card.as_json(OPTIONS, [], points[:1], None)["regret"]["budget"] is None


def test_the_card_has_a_line_for_each_point_and_each_contestant() -> None:
    lines = card.sweep_table(OPTIONS, [], [point("good", 32)]).cells()
    assert lines[0] == [
        *("good, 32", "100", "chain 8", "2.00", "1.20"),
        *("1.90 (1.90-1.90)", "0.95 (0.95-0.95)"),
    ]
    table = card.rollout_table(OPTIONS, rollouts())
    lines = table.cells()
    assert [line[0] for line in lines] == list(RACE.speeds)
    assert lines[4][4] == "10% (0% to 20%)"
    assert "best fixed: chain 2 (CPU: 50%)" in table.title
    assert "1: chain 8, 64: off" in table.title


@final
class _Recorder(Drafter):
    """A drafter that counts on from the last token or repeats a tree, and records its calls."""

    def __init__(self, tree: DraftTree | None = None) -> None:
        self._tree = tree
        self.calls: list[object] = []

    @property
    def taps(self) -> Taps:
        return NO_TAPS

    def propose(
        self, requests: Sequence[Draftable], strategy: Strategy, noise: Noise | None
    ) -> list[DraftTree]:
        return [self._tree or counting(each, strategy) for each in requests]

    def observe(
        self, seen: Sequence[Observed], features: Float[Tensor, "tokens features"] | None
    ) -> None:
        self.calls.append(("observe", seen))

    def learn(self, trees: Sequence[DraftTree], accepted: Sequence[Accepted]) -> None:
        self.calls.append(("learn", trees))

    def forget(self, request_id: str) -> None:
        self.calls.append(("forget", request_id))

    def refresh(self) -> None:
        self.calls.append("refresh")

    @property
    def forward_s(self) -> float:
        return 1.5

    @property
    def calibration_error(self) -> float:
        return 0.25


def counting(request: Draftable, strategy: Strategy) -> DraftTree:
    depth = min(strategy.depth, request.max_depth)
    last = request.tokens[-1]
    return DraftTree(
        tokens=tuple((last + 1 + i) % 20 for i in range(depth)),
        parents=tuple(range(depth)),
        margins=(1.0,) * depth,
        reach=tuple(0.95 ** (i + 1) for i in range(depth)),
    )


# 0 -> 1, 2;  1 -> 3;  3 -> 4
TREE = DraftTree(
    tokens=(5, 19, 7, 8),
    parents=(0, 0, 1, 3),
    margins=(2.0, -2.0, 0.7, 1.1),
    reach=(0.9, 0.1, 0.8, 0.7),
)


def asking(name: str, length: int) -> Draftable:
    return Draftable(
        request_id=name,
        tokens=[0] * length,
        prompt_len=1,
        sampling=SamplingParams(max_tokens=4096),
        max_depth=9,
    )


def spoiled(share: float, requests: Sequence[Draftable]) -> list[DraftTree]:
    return SpoilingDrafter(_Recorder(TREE), share, 20).propose(requests, DEEP, None)


def test_spoiling_changes_its_share_of_the_tokens_and_nothing_else() -> None:
    requests = [asking(str(name), length) for name in range(20) for length in range(1, 400, 16)]
    trees = spoiled(0.3, requests)
    changed = [a != b for tree in trees for a, b in zip(tree.tokens, TREE.tokens, strict=True)]
    # 500 requests x 3 distinct depths, a binomial share: a deviation of 0.012
    assert sum(changed) / len(changed) == pytest.approx(0.3, abs=0.06)
    assert all(replace(tree, tokens=TREE.tokens) == TREE for tree in trees)
    assert {tree.tokens[1] for tree in trees} == {19, 0}  # another token of the vocabulary
    assert spoiled(0.3, requests) == trees
    assert {tree.tokens for tree in spoiled(1.0, requests)} == {(6, 0, 8, 9)}


def test_a_position_is_spoiled_for_every_draft_that_reaches_it() -> None:
    for length in range(1, 50):
        near, far = spoiled(0.3, [asking("a", length + 2), asking("a", length)])
        assert (near.tokens[0] == 5) == (far.tokens[3] == 8)  # depth 1 of the one, 3 of the other


def test_the_inner_drafter_receives_every_call_with_the_spoiled_trees() -> None:
    recorder = _Recorder(TREE)
    drafter = SpoilingDrafter(recorder, 1.0, 20)
    trees = drafter.propose([asking("a", 3)], DEEP, None)
    drafter.observe((), None)
    drafter.learn(trees, ())
    drafter.forget("a")
    drafter.refresh()
    assert recorder.calls == [("observe", ()), ("learn", trees), ("forget", "a"), "refresh"]
    assert trees[0].tokens == (6, 0, 8, 9)
    assert (drafter.forward_s, drafter.calibration_error) == (1.5, 0.25)
    assert drafter.taps is NO_TAPS


def batch(running: int) -> Batch:
    return Batch(
        num_draftable=running,
        num_sampled=running,
        num_tokens=running,
        num_pairs=running * 100,
        room=running * 16,
    )


def test_the_oracle_uses_its_table_at_the_nearest_number() -> None:
    tuner = OracleTuner({1: DEEP, 8: SHALLOW, 64: None})
    tuner.begin(None, 1)
    played = {running: tuner.plan(batch(running)).strategy for running in (1, 2, 3, 8, 20, 30, 64)}
    assert played == {1: DEEP, 2: DEEP, 3: SHALLOW, 8: SHALLOW, 20: SHALLOW, 30: None, 64: None}
    assert tuner.plan(batch(64)) is PLAIN


def test_the_oracles_table_is_the_good_drafters_best_or_plain_decoding() -> None:
    points = [
        point("good", 1),
        point("good", 64, chain_8=70.0, chain_2=90.0),
        point("mediocre", 1, chain_2=900.0),
    ]
    assert oracle_table(points) == {1: DEEP, 64: None}


@pytest.mark.slow
def test_a_measurement_of_a_scripted_model_ends_in_a_card() -> None:
    subject = Subject(
        name="scripted",
        model=scripted_model(20),
        decode=str,
        prompts=[(0,)] * 6,
        sampling=SamplingParams(max_tokens=24),
        drafters={"eagle1": _Recorder},
    )
    options = TunerBenchOptions(running=(2,), tokens=50, repeats=1, drafters=("good",), quick=True)
    logged: list[str] = []
    with unchecked_shapes():
        points = sweep(subject, options, logged.append)
        whole = measure_rollouts(subject, options, points, logged.append)
    assert len(points) == 1
    assert len(points[0].race.fixed) == 3
    assert points[0].accept_length[points[0].race.best_fixed] > 2
    assert points[0].differing_share == whole.differing_share == 0
    assert set(whole.race.speeds) == {*whole.race.fixed, OFF, BANDIT, BUDGET, ORACLE}
    assert whole.oracle[2] in points[0].race.fixed or whole.oracle[2] == OFF
    assert set(whole.series.running) <= set(range(1, 7))
    assert whole.accept_length["chain 8"] > 2
    json.dumps(card.as_json(OPTIONS, [], points, whole))


def test_fixed_strategies_begin_with_a_new_drafter_and_tuners_keep_theirs() -> None:
    made: list[Drafter] = []

    def make() -> Drafter:
        made.append(_Recorder(TREE))
        return made[-1]

    for speculation in lineup(make, (DEEP, SHALLOW)).values():
        speculation()
        speculation()
    assert len(made) == 2 * 2 + 2  # two strategies' turns, two tuners; `off` has no drafter
    subject = Subject(
        name="scripted",
        model=scripted_model(20),
        decode=str,
        prompts=(),
        sampling=SamplingParams(max_tokens=8),
        drafters={"eagle1": make},
    )
    assert maker(subject, "good")() is made[-1]
    assert isinstance(maker(subject, "mediocre")(), SpoilingDrafter)
