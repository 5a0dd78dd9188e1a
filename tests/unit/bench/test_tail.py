"""The simulated tail: against token by token, and laws of any prediction."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longtail.bench.e2e.tail import Prediction, predict, worker_seconds

HEAVY = [int(20 * (1 - share) ** -0.8) for share in np.linspace(0.0, 0.999, 400)]
"""Most near 20 tokens, the longest near 5,000."""


def step_s(running: int) -> float:
    return 0.004 + 0.0005 * running


def speedup(running: int) -> float:
    """Worth most with few running, a loss with many."""
    return 3.0 / (1.0 + 0.1 * running)


def predicted(workers: int, lengths: list[int] = HEAVY, **changed: object) -> Prediction:
    arguments = {
        "step_s": step_s, "speedup": speedup, "workers": workers, "requests_per_worker": 16,
        "seed": 3, **changed,
    }  # fmt: skip
    return predict(lengths, **arguments)


def by_token(lengths: list[int], token_s: list[float]) -> float:
    """Write one token of each, again and again."""
    left, seconds = list(lengths), 0.0
    while left:
        seconds += token_s[len(left) - 1]
        left = [tokens - 1 for tokens in left if tokens > 1]
    return seconds


@pytest.mark.slow
@given(
    st.integers(1, 6).flatmap(
        lambda requests: st.tuples(
            st.lists(
                st.lists(st.integers(1, 40), min_size=requests, max_size=requests),
                min_size=1,
                max_size=4,
            ),
            st.lists(st.floats(0.001, 9.0), min_size=requests, max_size=requests),
        )
    )
)
def test_a_workers_time_is_that_of_its_tokens_one_by_one(
    case: tuple[list[list[int]], list[float]],
) -> None:
    lengths, token_s = case
    seconds = worker_seconds(np.array(lengths), np.array(token_s))
    assert seconds.tolist() == pytest.approx([by_token(each, token_s) for each in lengths])


def test_a_prediction_is_that_of_its_draws_token_by_token() -> None:
    lengths, workers, requests, seed = [3, 5, 9, 40], 3, 4, 11
    found = predicted(workers, lengths, requests_per_worker=requests, seed=seed)
    draws = np.random.default_rng(seed).choice(np.array(lengths), size=(64, workers, requests))
    plain = [step_s(running) for running in range(1, requests + 1)]
    drafted = [step_s(running) / speedup(running) for running in range(1, requests + 1)]
    off = [[by_token(worker, plain) for worker in rollout] for rollout in draws.tolist()]
    spot = [[by_token(worker, drafted) for worker in rollout] for rollout in draws.tolist()]
    rollout_s_off = sum(max(each) for each in off) / 64
    rollout_s_spot = sum(max(each) for each in spot) / 64
    busy = sum(sum(each) for each in off) / (64 * workers)
    assert found.rollout_s_off == pytest.approx(rollout_s_off)
    assert found.rollout_s_spot == pytest.approx(rollout_s_spot)
    assert found.idle_share == pytest.approx(1 - busy / rollout_s_off)
    busy = sum(sum(each) for each in spot) / (64 * workers)
    assert found.idle_share_spot == pytest.approx(1 - busy / rollout_s_spot)
    assert found.gain == pytest.approx(rollout_s_off / rollout_s_spot)


def test_workers_with_equal_lengths_are_never_idle() -> None:
    found = predicted(8, [50])
    assert found.idle_share == pytest.approx(0.0, abs=1e-12)
    assert found.rollout_s_off == pytest.approx(50 * step_s(16))


def test_a_single_worker_never_waits() -> None:
    assert predicted(1).idle_share == pytest.approx(0.0, abs=1e-12)


def test_more_workers_are_idle_for_longer_where_the_tail_is_heavy() -> None:
    shares = [predicted(workers).idle_share for workers in (1, 2, 8, 32, 128)]
    assert shares == sorted(shares)
    assert shares[-1] > shares[1] + 0.1
    assert all(0.0 <= share < 1.0 for share in shares)


def test_a_rollout_of_more_workers_gains_more_from_its_tail() -> None:
    # the last worker's requests end one by one, and speculation is worth most for the last ones
    gains = [predicted(workers).gain for workers in (1, 8, 128)]
    assert gains == sorted(gains)
    assert 1.0 < gains[0] < gains[-1] < speedup(1)


def test_a_speedup_that_is_the_same_everywhere_is_the_gain() -> None:
    assert predicted(4, speedup=lambda running: 1.75).gain == pytest.approx(1.75)


def test_the_same_seed_gives_the_same_prediction_and_another_one_nearly_so() -> None:
    assert predicted(8) == predicted(8)
    other = predicted(8, seed=4)
    assert other != predicted(8)
    # 64 rollouts: the mean of a longest completion is known to a few percent of its spread
    assert other.idle_share == pytest.approx(predicted(8).idle_share, abs=0.1)
