"""The first measurement: what it must look like on any machine, and what it leaves behind."""

from itertools import pairwise

import pytest
import torch

from longtail.engine import profile
from longtail.engine.profile import Profiler, measure_steps, without_stalls
from longtail.engine.request import EngineLimits
from longtail.speculation.drafter import Taps
from longtail.tuner.cost import CostModel, TimeCurve
from support.drafters import RIGHT, ScriptedDrafter
from support.tiny_models import tiny_model

LIMITS = EngineLimits(max_running=4, max_step_tokens=64, max_len=128)
TEXTS = {f"profile-{i}": (0,) * 500 for i in range(4)}


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less time than a session gets; what there is no time for is left out."""
    monkeypatch.setattr(profile, "_SECONDS", 0.2)
    monkeypatch.setattr(profile, "_DRAFT_SECONDS", 0.1)


def scripted(taps: Taps) -> ScriptedDrafter:
    return ScriptedDrafter(TEXTS, RIGHT, taps=taps, informed=False)


@pytest.mark.parametrize(
    ("counts", "seconds", "found"),
    [
        ((1, 2, 3), (1.0, 9.0, 2.0), [1.0, 1.65, 2.0]),
        ((1, 2, 4), (1.0, 9.0, 0.5), [1.0, 1.1, 0.5]),
        ((1, 2, 3, 4, 5), (1.0, 9.0, 1.2, 9.0, 1.4), [1.0, 1.21, 1.2, 1.43, 1.4]),
        ((1, 2, 3, 8), (1.0, 1.5, 2.0, 4.5), [1.0, 1.5, 2.0, 4.5]),
        ((12, 13, 16), (1.0, 1.5, 1.5), [1.0, 1.5, 1.5]),  # a block of rows
        ((1, 9), (5.0, 1.0), [5.0, 1.0]),
        ((1,), (5.0,), [5.0]),
    ],
)
def test_a_measurement_is_lowered_only_above_both_neighbours(counts, seconds, found):
    assert without_stalls(counts, seconds) == pytest.approx(found)


@pytest.mark.many_steps
def test_a_measured_model_costs_something_and_more_costs_more():
    costs = measure_steps(tiny_model(), LIMITS)
    assert costs.drafts == []
    assert costs.pair_s >= 0
    assert 0 <= costs.node_pair_s <= costs.pair_s
    for curve in (costs.plain, costs.verify):
        times = [curve.at(count) for count in (1, 2, 4, 16, 64, 200)]
        assert times[0] > 0
        assert all(a <= b for a, b in pairwise(times))
    counts = costs.plain._counts
    assert counts[0] == 1
    assert max(counts) <= LIMITS.max_step_tokens


@torch.inference_mode()
def test_every_drafter_gets_a_cost_and_forgets_the_synthetic_requests():
    drafters = [scripted(Taps()), scripted(Taps(layers=(1,), final=True))]
    known = CostModel(TimeCurve((1, 8), (1e-3, 2e-3)), pair_s=0.0, node_pair_s=0.0)
    profiler = Profiler(tiny_model(), LIMITS)
    profiler.costs = known
    costs = profiler.measure(drafters)
    assert costs is known  # steps are not measured again
    assert costs.plain.at(8) == pytest.approx(2e-3)
    assert len(costs.drafts) == 2
    for cost, drafter in zip(costs.drafts, drafters, strict=True):
        assert 0 < cost.seconds(1, 1.0, 1.0) <= cost.seconds(4, 6.0, 24.0)
        assert drafter.memories == {}
        assert {name for name, _ in drafter.gone} == set(TEXTS)


def test_a_drafter_that_returns_keeps_its_corrected_costs():
    profiler = Profiler(tiny_model(), LIMITS)
    profiler.costs = CostModel(TimeCurve((1, 8), (1e-3, 2e-3)), pair_s=0.0, node_pair_s=0.0)
    first, second = scripted(Taps()), scripted(Taps())
    costs = profiler.measure([first, second])
    corrected = costs.drafts[1] = costs.drafts[1].scaled(2.0)
    kept = costs.drafts[0]
    assert profiler.measure([first]).drafts == [kept]
    assert profiler.measure([second, first]).drafts == [corrected, kept]


@pytest.mark.many_steps
@pytest.mark.parametrize(("running", "tokens"), [(1, 1), (3, 3)])
def test_the_tightest_engine_can_be_measured(running, tokens):
    limits = EngineLimits(max_running=running, max_step_tokens=tokens, max_len=16)
    costs = measure_steps(tiny_model(), limits)
    assert costs.plain.at(1) > 0
