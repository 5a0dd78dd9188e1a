"""The first measurement: what it must look like on any machine, and what it leaves behind."""

from itertools import pairwise

import pytest
import torch

from longtail.engine import profile
from longtail.engine.profile import measure_drafts, measure_steps
from longtail.engine.request import EngineLimits
from longtail.speculation.drafter import Taps
from support.drafters import RIGHT, ScriptedDrafter
from support.tiny_models import tiny_model

LIMITS = EngineLimits(max_running=4, max_step_tokens=64, max_len=128)
TEXTS = {f"profile-{i}": (0,) * 500 for i in range(4)}


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less time than a session gets; what there is no time for is left out."""
    monkeypatch.setattr(profile, "_SECONDS", 0.2)
    monkeypatch.setattr(profile, "_DRAFT_SECONDS", 0.1)


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
@pytest.mark.parametrize("taps", [Taps(), Taps(layers=(1,), final=True)])
def test_a_drafter_gets_a_cost_and_forgets_the_synthetic_requests(taps):
    drafter = ScriptedDrafter(TEXTS, RIGHT, taps=taps, informed=False)
    cost = measure_drafts(drafter, tiny_model(), LIMITS)
    assert 0 < cost.seconds(1, 1.0, 1.0) <= cost.seconds(4, 6.0, 24.0)
    assert drafter.memories == {}
    assert {name for name, _ in drafter.gone} == set(TEXTS)


@pytest.mark.many_steps
@pytest.mark.parametrize(("running", "tokens"), [(1, 1), (3, 3)])
def test_the_tightest_engine_can_be_measured(running, tokens):
    limits = EngineLimits(max_running=running, max_step_tokens=tokens, max_len=16)
    costs = measure_steps(tiny_model(), limits)
    assert costs.plain.at(1) > 0
