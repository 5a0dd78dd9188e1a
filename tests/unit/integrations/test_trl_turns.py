"""A trainer's prompts and rollouts: noise keys over processes and turns, and metrics."""

import pytest
import torch

from longtail.engine.report import RolloutReport
from longtail.integrations.trl.noise_keys import Batch, Turns
from longtail.integrations.trl.patches import Ranks
from longtail.integrations.trl.session import SessionMetrics

A, B = (3, 9, 4), (7, 7)


def batch(**changes: int | bool) -> Batch:
    return Batch(**{"seed": 0, "step": 5, "is_training": True, "first": 0, **changes})


def keys(prompts: list[tuple[int, ...]], **changes: int | bool) -> list[int]:
    return [each.key for each in Turns().begin(prompts, batch(**changes))[0]]


def test_a_key_does_not_depend_on_the_number_of_processes() -> None:
    whole = keys([A, A, B, B])
    assert len(set(whole)) == 4
    assert whole == keys([A, A]) + keys([B, B], first=2)
    assert whole == keys([A]) + keys([A, B, B], first=1)


def test_seed_step_and_evaluation_change_every_key() -> None:
    several = [keys([A, B]), keys([A, B], seed=1), keys([A, B], step=6)]
    several.append(keys([A, B], is_training=False))
    assert len({key for found in several for key in found}) == 8


def test_samples_of_one_prompt_share_a_group() -> None:
    groups = [each.group for each in Turns().begin([A, A, B], batch())[0]]
    assert groups[0] == groups[1] != groups[2]


def test_a_later_turn_keeps_the_key_of_its_sample() -> None:
    turns = Turns()
    first, is_first = turns.begin([A, A, B], batch())
    assert is_first
    turns.end(first, [(1, 2), (1, 5, 2), (6, 2)])
    second, is_first = turns.begin([(*A, 1, 5, 2, 8, 8), (*B, 6, 2, 8, 8)], batch())
    assert not is_first
    assert [each.key for each in second] == [first[1].key, first[2].key]
    assert len({each.request_id for each in (*first, *second)}) == 5
    turns.end(second, [(4, 2), (5, 2)])
    third, _ = turns.begin([(*A, 1, 5, 2, 8, 8, 4, 2, 9)], batch())
    assert [each.key for each in third] == [first[1].key]


def begun(prompts: list[tuple[int, ...]]) -> tuple[Turns, list[int]]:
    """Return the turns after a first one in which all samples wrote the same, and its keys."""
    turns = Turns()
    first, _ = turns.begin(prompts, batch())
    turns.end(first, [(1, 2)] * len(prompts))
    return turns, [each.key for each in first]


def test_a_later_turn_is_found_though_the_last_token_was_left_out() -> None:
    turns, first = begun([A])
    assert [each.key for each in turns.begin([(*A, 1, 8, 8)], batch())[0]] == first


def test_equal_texts_of_two_samples_go_on_with_their_own_keys() -> None:
    turns, first = begun([A, A])
    assert [each.key for each in turns.begin([(*A, 1, 2, 8)] * 2, batch())[0]] == first


def test_a_second_batch_of_one_step_has_keys_of_its_own() -> None:
    turns, first = begun([A, B])
    second, is_first = turns.begin([A, B], batch())
    assert is_first
    assert {each.key for each in second}.isdisjoint(first)


def test_metrics_are_means_of_the_rollouts_since_the_last_log() -> None:
    ranks = Ranks(0, 1, torch.device("cpu"))
    metrics = SessionMetrics(ranks)
    report = RolloutReport(num_generated=30, num_drafted=20, num_accepted=6, num_verified=10)
    assert metrics.drain() == {}
    for seconds in (2.0, 4.0):
        metrics.begin()
        metrics.add(report, seconds)
    found = metrics.drain()
    assert found["timing_s/gen"] == pytest.approx(3.0)
    assert found["rollout/generated_tokens"] == pytest.approx(30.0)
    assert found["rollout/tokens_per_s"] == pytest.approx(10.0)
    assert found["rollout/spec_accept_length"] == pytest.approx(1.6)
    assert found["rollout/spec_accept_rate"] == pytest.approx(0.3)
    assert metrics.drain() == {}
