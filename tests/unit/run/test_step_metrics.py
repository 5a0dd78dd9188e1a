from dataclasses import replace

import pytest

from longtail.cluster.records import RolloutResult, ShardResult, TaskResult
from longtail.engine.report import RolloutMeter, merge_reports
from longtail.rl.grading.pool import Graded
from longtail.rl.learner_metrics import LearnerMetrics
from longtail.run.step_metrics import SampleRound, StepRecord, group_metrics, rollout_metrics
from longtail.types import Completion, Group, Prompt, Rollout
from support.rollouts import completion

P = Prompt(prompt_id="p", tokens=(1,), text="?")
REPORT = replace(
    RolloutMeter().report(),
    **{"seconds": 2.0, "engine_s": 2.0, "forward_s": 1.0, "sample_s": 0.5, "running_s": 6.0},
    **{"num_steps": 10, "num_generated": 40, "num_computed": 50, "max_running": 4},
)


def _completion(length: int) -> Completion:
    return completion(f"p@0#{length}", (1,) * length)


def _rollout(reward: float) -> Rollout:
    return Rollout(prompt=P, completion=_completion(1), reward=reward)


def test_waiting_for_another_engine_is_not_bookkeeping() -> None:
    half = replace(REPORT, seconds=1.0, engine_s=1.0, forward_s=0.5, sample_s=0.25, running_s=3.0)
    both = merge_reports([REPORT, half], seconds=2.0)
    assert both.engine_s == 1.5
    assert both.bookkeeping_share == 0.25 == REPORT.bookkeeping_share == half.bookkeeping_share
    assert both.tail_idle_share == 1 - 9.0 / (8 * 2.0)


def test_metrics_of_drafting_exist_only_for_steps_that_drafted() -> None:
    completions = [_completion(40)]
    drafted = replace(
        REPORT, num_drafted=60, num_accepted=15, num_verified=10, draft_s=0.5, draft_forward_s=0.25
    )
    metrics, plain = (rollout_metrics(report, completions) for report in (drafted, REPORT))
    assert {name: metrics[name] for name in metrics.keys() - plain.keys()} == {
        "speculation/accept_length": 2.5,
        "speculation/accepted_share": 0.25,
        "speculation/emitted_share": 25 / 40,
        "speculation/draft_share": 0.25,
    }
    later = replace(drafted, num_accepted_later=3, num_verified_later=2)
    added = rollout_metrics(later, completions).items() - metrics.items()
    assert added == {("speculation/accept_length_later_turns", 2.5)}
    # The drafter's own passes are no bookkeeping.
    assert metrics["rollout/bookkeeping_share"] == plain["rollout/bookkeeping_share"] - 0.125


def test_grading_failures_are_counted_apart_from_rewards() -> None:
    rollouts = (_rollout(1.0), _rollout(0.5), _rollout(0.5))
    groups = [Group(prompt=P, rollouts=rollouts[:2]), Group(prompt=P, rollouts=rollouts[2:])]
    numbers = group_metrics(rollouts, 2, groups)
    assert numbers["reward/mean"] == pytest.approx(2 / 3)
    assert numbers["reward/std"] == pytest.approx(0.5**1.5 / 1.5)
    assert (numbers["reward/min"], numbers["reward/max"]) == (0.5, 1.0)
    assert numbers["reward/failures"] == 2.0
    assert numbers["reward/informative_groups"] == 0.5


def test_metrics_of_a_step_include_the_seconds_of_loop_and_learner() -> None:
    rollouts = (_rollout(1.0), _rollout(0.0))
    learned = LearnerMetrics(seconds={"logprob": 3.0, "backward": 3.0, "update": 1.0}).report(8, [])
    shard = ShardResult(completions=(_completion(1),), report=REPORT, series=None)
    rollout = RolloutResult(
        completions=shard.completions,
        shards=(TaskResult(worker=0, result=shard),),
        spots=(),
        seconds=2.0,
    )
    graded = Graded(rollouts=rollouts, failures=())
    record = StepRecord(
        rounds=[SampleRound(num_prompts=1, rollout=rollout, graded=graded)] * 2,
        num_learned=1,
        learned=learned,
        seconds={"rollout": 2.0, "reward": 0.5, "publish": 0.25, "step": 10.0},
    )
    numbers = record.metrics()
    assert (numbers["timing_s/logprob"], numbers["timing_s/update"]) == (3.0, 4.0)
    assert numbers["training/policy_version"] == 8.0
    assert numbers["reward/mean"] == 0.5
    assert (numbers["rollout/rounds"], numbers["rollout/left_out_groups"]) == (2.0, 1.0)
    assert numbers["rollout/generated_tokens"] == 2 * REPORT.num_generated
    assert numbers["rollout/tokens_per_s"] == REPORT.num_generated / 2.0
    assert record.shortage(2, 0) == record.shortage(1, 9) == []
    (line,) = record.shortage(2, 9)
    assert line.startswith("learned from 1 groups of 2: all others of 2 rounds have equal rewards")
    assert all(type(value) is float for value in numbers.values())
