"""More workers in simulated time: closed forms of tiny steps, and the same numbers every time."""

import pytest

from longtail.bench.e2e.arms import Texts
from longtail.bench.e2e.simulated import MESSAGE_S, Simulated, Speeds, resampled, simulate
from longtail.config import rl as config

SPEEDS = Speeds(0.01, 0.002, learn_token_s=0.01, update_s=0.5, publish_s=0.25, others_s=0.125)
MESSAGES = pytest.approx
JITTER_S = 60 * MESSAGE_S
"""Most seconds of messages in the steps below."""


def texts(name: str, *lengths: int) -> Texts:
    return Texts(name=f"{name}@0", prompt_len=10, lengths=lengths, is_learned=True)


def step(
    *groups: Texts, workers: int, speeds: Speeds = SPEEDS, streams: bool = False, shares: bool = False
) -> Simulated:
    words = (
        f"--learner.streaming={str(streams).lower()}",
        f"--rollout.sharing={str(shares).lower()}",
        "--rollout.max_tokens=1000",
    )
    own = config.load(None, ["--model.path=none", *words])
    return simulate(own, [(groups, speeds)], workers)


def near(seconds: float) -> object:
    """Return what equals some seconds, or more by messages."""
    return pytest.approx(seconds + JITTER_S / 2, abs=JITTER_S / 2)


def test_one_worker_writes_its_texts_as_the_sum_of_a_plus_b_n() -> None:
    alone = step(texts("p", 50, 20), workers=1)
    assert alone.rollout_s == near(20 * (0.01 + 2 * 0.002) + 30 * (0.01 + 0.002))
    assert alone.step_s - alone.rollout_s == near(80 * 0.01 + 0.5 + 0.25 + 0.125)


def test_a_rollout_of_two_workers_ends_with_the_longer_text_and_one_is_idle_until_then() -> None:
    both = step(texts("p", 300), texts("q", 100), workers=2)
    assert both.rollout_s == near(300 * 0.012)
    assert both.step_s == near(300 * 0.012 + 310 * 0.01 + 0.5 + 0.25 + 0.125)
    assert both.idle_share * 2 * both.step_s == near(200 * 0.012 + 2 * 0.125)


def test_what_an_idle_worker_learns_ahead_is_hidden_behind_the_longest_text() -> None:
    groups = texts("p", 200), texts("q", 20), texts("r", 20)
    after = step(*groups, workers=2)
    ahead = step(*groups, workers=2, streams=True)
    alone = step(texts("p", 200), workers=2)
    assert after.step_s - after.rollout_s == near(210 * 0.01 + 0.875)
    assert ahead.rollout_s == pytest.approx(after.rollout_s, abs=JITTER_S)
    assert ahead.step_s == near(ahead.rollout_s + alone.step_s - alone.rollout_s - JITTER_S / 2)
    # The last group's learning is all that is left; with it learned in parts nothing would be.
    two = texts("p", 200), texts("q", 200), texts("r", 20), texts("s", 20)
    assert step(*two, workers=2, streams=True).step_s < step(*two, workers=2).step_s + JITTER_S


def test_a_running_text_moves_to_the_idle_worker_where_that_ends_the_rollout_sooner() -> None:
    slow = SPEEDS._replace(start_s=0.001, text_s=0.02)
    groups = texts("p", 400), texts("q", 5), texts("r", 400), texts("s", 5)
    apart, together = (
        step(*groups, workers=2, speeds=slow, shares=shares).rollout_s for shares in (True, False)
    )
    assert together == near(400 * 0.041)
    assert 400 * 0.021 < apart < 0.75 * together


def test_the_same_steps_give_the_same_numbers_and_more_workers_have_as_many_texts_each() -> None:
    steps = [[texts(f"p{i}", 3 * i + 5, 7 * i + 2) for i in range(4)] for _ in range(2)]
    assert resampled(steps, 1.0) == steps
    drawn = resampled(steps, 4.0)
    assert drawn == resampled(steps, 4.0)
    assert [len({each.name for each in step}) for step in drawn] == [16, 16]
    assert {each.lengths for step in drawn for each in step} == {e.lengths for e in steps[0]}
    assert step(*drawn[0], workers=8, streams=True, shares=True) == step(
        *drawn[0], workers=8, streams=True, shares=True
    )
