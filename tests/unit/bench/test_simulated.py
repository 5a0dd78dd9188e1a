"""More workers in simulated time: closed forms of tiny steps, and the same numbers every time."""

import pytest

from longtail.bench.e2e.arms import Texts
from longtail.bench.e2e.simulated import (
    MESSAGE_S,
    Messages,
    Simulated,
    Speeds,
    resampled,
    simulate,
)
from longtail.config import rl as config

SPEEDS = Speeds(0.01, 0.002, learn_token_s=0.01, update_s=0.5, publish_s=0.25, others_s=0.125)
JITTER_S = 60 * MESSAGE_S
"""Most seconds of messages in the steps below."""


def texts(name: str, *lengths: int) -> Texts:
    return Texts(name=f"{name}@0", prompt_len=10, lengths=lengths, is_learned=True)


def configured(*, streams: bool = False, shares: bool = False) -> config.RunConfig:
    words = f"--learner.streaming={streams}".lower(), f"--rollout.sharing={shares}".lower()
    return config.load(None, ["--model.path=none", "--rollout.max_tokens=1000", *words])


def step(*groups: Texts, workers: int, **switches: bool) -> Simulated:
    return simulate(configured(**switches), [(groups, SPEEDS)], workers)


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
    groups = texts("p", 300)._replace(is_learned=False), texts("q", 90), texts("r", 90)
    after, ahead = (step(*groups, workers=2, streams=streams) for streams in (False, True))
    rollout_s = 90 * 0.014 + 210 * 0.012  # r is written beside p
    assert (after.rollout_s, ahead.rollout_s) == (near(rollout_s), near(rollout_s))
    assert after.step_s - after.rollout_s == near(100 * 0.01 + 0.875)
    assert ahead.step_s - ahead.rollout_s == near(0.875)


def test_a_running_text_moves_to_the_idle_worker_where_that_ends_the_rollout_sooner() -> None:
    slow = SPEEDS._replace(start_s=0.001, text_s=0.02)
    warm = [texts(f"w{length}", length) for length in range(20, 180, 20)]
    skewed = [texts("p", 400), texts("q", 5), texts("r", 400), texts("s", 5)]
    moved, stayed = (
        simulate(configured(shares=shares), [(warm, slow), (skewed, slow)], 2).rollout_s
        - simulate(configured(shares=shares), [(warm, slow)], 2).rollout_s
        for shares in (True, False)
    )
    assert stayed == near(400 * 0.041)
    assert 400 * 0.021 < moved < 0.75 * stayed


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


def test_a_step_with_next_to_no_work_takes_its_messages_of_which_tasks_grow_with_workers() -> None:
    nothing = Speeds(1e-9, 0.0, 0.0, 0.0, 0.0, 0.0)
    messages = Messages(task_s=0.01, ask_s=0.001, more_s=0.002)
    two, eight = (
        simulate(configured(), [([texts(f"{i}", 1) for i in range(num)], nothing)], num, messages)
        for num in (2, 8)
    )
    for each in (two, eight):
        assert each.step_s == pytest.approx(each.messages_s, abs=1e-6)
    tasks = 3  # generate, learn, publish
    assert eight.messages_s - two.messages_s > 5.9 * tasks * messages.task_s
