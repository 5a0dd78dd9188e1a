"""A worker of half the speed, in simulated time: it gets half as many tokens as another one."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longtail.cluster.schedule.forecast import WorkerSpeeds
from support.fake_worker import text
from support.scripted_pool import ScriptedPool, begun, requests

START_S, TEXT_S = 0.004, 0.01
"""Seconds of a token of each of n texts on the fast worker: START_S + n TEXT_S."""
SIBLINGS = 4
LENGTHS = random.Random(0).choices(range(20, 200), k=12)
REQUESTS = requests(*(each for each in LENGTHS for _ in range(SIBLINGS)), siblings=SIBLINGS)
NUM_TOKENS = SIBLINGS * sum(LENGTHS)
OPTIMUM_S = TEXT_S * NUM_TOKENS / 1.5
"""Least seconds of workers with speeds 1 and 0.5: neither ever waits, and steps begin for free."""
PLACED_S = OPTIMUM_S + TEXT_S * 2 * max(LENGTHS) / 1.5 + START_S * max(LENGTHS) / 0.5
"""Most seconds when placed by known lengths: a part has 2 texts, see `placement.place`."""


def scripted() -> ScriptedPool:
    return ScriptedPool(
        2, has_drafter=False, token_s=lambda num: START_S + TEXT_S * num, slowness={1: 2.0}
    )


def rolled(group) -> tuple[float, float]:
    """Make a rollout; return its seconds, and the share of worker 1 in the tokens."""
    found = group.rollout(1, REQUESTS)
    assert [each.tokens for each in found.completions] == [text(each) for each in REQUESTS]
    tokens = [each.value().report.num_generated for each in found.shards if each.worker == 1]
    return found.seconds, sum(tokens) / NUM_TOKENS


def test_from_the_second_rollout_on_a_slow_worker_has_its_share_and_nobody_waits() -> None:
    group = begun(scripted())
    first_s, first_share = rolled(group)
    assert first_share == pytest.approx(0.5, abs=0.02)
    assert first_s > NUM_TOKENS * TEXT_S
    for _ in range(2):
        seconds, share = rolled(group)
        assert OPTIMUM_S < seconds < PLACED_S < 1.15 * OPTIMUM_S
        assert share == pytest.approx(1 / 3, abs=0.03)


def test_a_worker_in_place_of_a_slow_one_counts_as_fast_and_one_that_becomes_slow_is_seen() -> None:
    pool = scripted()
    group = begun(pool)
    rolled(group)
    assert rolled(group)[1] == pytest.approx(1 / 3, abs=0.03)
    pool.kill(1)
    group.publish()
    pool.script.slowness = {0: 2.0}
    assert rolled(group)[1] == pytest.approx(0.5, abs=0.02)
    assert rolled(group)[1] == pytest.approx(2 / 3, abs=0.03)


def measured(*seconds: float) -> list[float]:
    """Return the speeds of workers that write 100 tokens of each of 4 texts in some seconds."""
    speeds = WorkerSpeeds()
    for worker, each_s in enumerate(seconds):
        speeds.observe(worker, 4.0, 400, each_s)
    speeds.compare(lambda num: 0.1)
    return [speeds.of(worker) for worker in range(len(seconds))]


@given(
    st.lists(st.floats(10.0, 13.0), min_size=1, max_size=8),
    st.lists(st.floats(20.0, 26.0), min_size=1, max_size=8),
)
def test_workers_that_differ_by_noise_have_one_speed_and_slow_ones_have_one_too(fast, slow) -> None:
    found = measured(*fast, *slow)
    assert found[: len(fast)] == [1.0] * len(fast)
    assert len(set(found[len(fast) :])) == 1
    assert min(fast) / max(slow) <= found[-1] * (1 + 1e-9)
    assert found[-1] <= max(fast) / min(slow) * (1 + 1e-9)


def test_a_worker_that_was_hardly_observed_has_no_speed_yet() -> None:
    assert measured(1.0, 1.9) == [1.0, 1.0]
