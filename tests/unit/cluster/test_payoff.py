"""Training by a worker that is never idle: bounded, and only while it pays within the run."""

import math
from itertools import pairwise

import pytest
import torch

from longtail.cluster.drafter.payoff import SHARE, PayOff, rollout_s
from longtail.drafter.training.replica import Replica, SpotEnd, SpotReport
from longtail.engine.rollout_log import RolloutSeries
from longtail.tuner.cost import CostModel, DraftCost, TimeCurve

ROLLOUT_S = 20.0
RUNNING = (16,) * 100 + (1,) * 400


def series() -> RolloutSeries:
    zeros = (0,) * len(RUNNING)
    return RolloutSeries(
        seconds=tuple(0.04 * step for step in range(1, len(RUNNING) + 1)),
        running=RUNNING,
        drafts=zeros,
        nodes=zeros,
        accepted=zeros,
        switches=(),
    )


def costs(*, fixed_s: float = 0.04, token_s: float = 1e-4) -> CostModel:
    """Steps of `fixed_s`, to which each token adds `token_s`."""
    curve = TimeCurve((1, 512), (fixed_s + token_s, fixed_s + 512 * token_s))
    model = CostModel(curve, pair_s=0.0, node_pair_s=0.0)
    model.drafts = [DraftCost(start_s=1e-3, request_s=0.0, level_s=1e-3, row_s=1e-4)]
    return model


def report(seconds: float, accept_len: float | None, *, tokens_per_s: int = 2000) -> SpotReport:
    replica = None
    if accept_len is not None:
        replica = Replica(
            base_version=0,
            weights={"w": torch.ones(1)},
            num_tokens=int(seconds * tokens_per_s),
            num_steps=1,
            accept_len=accept_len,
            base_accept_len=1.0,
        )
    return SpotReport(
        num_steps=1,
        num_tokens=int(seconds * tokens_per_s),
        num_reused=0,
        seconds=seconds,
        max_micro_step_s=0.1,
        reason=SpotEnd.STOPPED,
        replica=replica,
    )


def train(curve, steps: int, model: CostModel) -> list[float]:
    """Seconds of training after each rollout of a run; `curve` maps trained tokens to lengths."""
    one, trained, spent = PayOff(), 0, []
    for step in range(1, steps + 1):
        limit_s = one.limit_s(ROLLOUT_S, series(), model, steps - step)
        spent.append(limit_s)
        if limit_s:
            trained += int(2000 * limit_s)
            one.record(report(limit_s, curve(trained)))
    return spent


def learns(num_tokens: int) -> float:
    """An accept length that rises by 0.4 per doubling beyond 4,000 tokens."""
    return min(1.0 + 0.4 * max(0.0, math.log2(max(num_tokens, 1) / 4000.0)), 5.0)


def test_a_drafter_that_learns_is_trained_and_saves_more_than_it_takes():
    spent = train(learns, 100, costs())
    assert all(spent[:20])
    assert spent[-1] == 0.0, "no rollout is left to pay it back"
    saved_s, trained, plain_s = 0.0, 0.0, rollout_s(series(), costs(), 1.0)
    for seconds in spent:
        saved_s += plain_s - rollout_s(series(), costs(), learns(int(trained)))
        trained += 2000 * seconds
    assert saved_s > 4 * sum(spent)


def test_a_drafter_that_learns_nothing_is_tried_with_doubling_waits():
    spent = train(lambda tokens: 1.05, 200, costs())
    trials = [step for step, seconds in enumerate(spent) if seconds]
    gaps = [b - a for a, b in pairwise(trials)]
    assert gaps == sorted(gaps)
    assert gaps[-1] == 17
    assert sum(spent) < 0.15 * SHARE * ROLLOUT_S * 200


def test_a_target_that_verifies_no_faster_than_it_decodes_is_not_worth_training_for():
    spent = train(learns, 200, costs(fixed_s=0.0, token_s=0.04))
    assert sum(spent) < 0.15 * SHARE * ROLLOUT_S * 200


@pytest.mark.parametrize("steps", [1, 2, 10, 100])
def test_training_never_takes_more_than_its_share(steps):
    for curve in (learns, lambda tokens: 1.0):
        assert sum(train(curve, steps, costs())) <= SHARE * ROLLOUT_S * steps + 1e-9


@pytest.mark.parametrize(("accept_len", "pays"), [(2.0, False), (2.4, True)])
def test_a_drafter_that_fits_is_trained_only_if_measurements_say_that_it_pays(accept_len, pays):
    one = PayOff()
    one.expect(50_000)
    assert one.limit_s(ROLLOUT_S, series(), costs(), 100) == 0.0
    for measured in (2.0, accept_len):
        one.record_idle(report(5.0, measured))
    assert (one.limit_s(ROLLOUT_S, series(), costs(), 100) > 0.0) == pays


def test_the_seconds_of_short_rollouts_are_saved_until_a_measurement_fits():
    one, spent = PayOff(), []
    for _ in range(100):
        limit_s = one.limit_s(1.0, series(), costs(), 1000)
        spent.append(limit_s)
        if limit_s:  # a measurement takes 0.7 s
            one.record(report(limit_s, 1.5 if limit_s > 0.7 else None))
    assert max(spent) > 0.7
    assert sum(spent) <= SHARE * 100 + 1e-9


def test_nothing_is_trained_without_a_cost_model_or_steps_to_come():
    one = PayOff()
    assert one.limit_s(ROLLOUT_S, None, costs(), 10) == 0.0
    assert one.limit_s(ROLLOUT_S, series(), None, 10) == 0.0
    assert one.limit_s(ROLLOUT_S, series(), costs(), 0) == 0.0
