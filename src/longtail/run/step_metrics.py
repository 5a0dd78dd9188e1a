"""Metrics of one training step, under verl's names where verl has them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from longtail.cluster.records import RolloutResult
from longtail.drafter.training.replica_gain import SpotReport
from longtail.engine.report import RolloutReport, join_reports
from longtail.engine.rollout_log import RolloutSeries
from longtail.rl.data.requests import regroup
from longtail.rl.data.sources import TASK
from longtail.rl.grading.pool import Graded
from longtail.rl.learner_metrics import LearnerReport
from longtail.types import Completion, Episode, FinishReason, Group, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRound:
    """Completions of some prompts, with their grades; dynamic sampling makes several per step."""

    num_prompts: int
    rollout: RolloutResult
    graded: Graded

    @property
    def groups(self) -> list[Group]:
        """Groups of the graded completions, in the order of the prompts."""
        return regroup(self.graded.rollouts)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """Results of one training step."""

    rounds: Sequence[SampleRound]
    num_learned: int
    """Number of groups that were learned from."""
    learned: LearnerReport
    seconds: Mapping[str, float]
    """Seconds by section, and of the whole `step`."""

    @property
    def groups(self) -> list[Group]:
        """Groups of all rounds, those that were left out included."""
        return [group for each in self.rounds for group in each.groups]

    @property
    def rollouts(self) -> list[Rollout]:
        """Graded completions of all rounds."""
        return [rollout for each in self.rounds for rollout in each.graded.rollouts]

    @property
    def series(self) -> RolloutSeries | None:
        """Speculation decisions of the last round."""
        return self.rounds[-1].rollout.series

    def shortage(self, wanted: int, refills: int) -> list[str]:
        """Return a line if up to `refills` further rounds did not give `wanted` groups."""
        if not refills or self.num_learned >= wanted:
            return []
        return [
            f"learned from {self.num_learned} groups of {wanted}: all others of "
            f"{len(self.rounds)} rounds have equal rewards (learner.max_refills = {refills})"
        ]

    def metrics(self) -> dict[str, float]:
        """Return all metrics of the step; the learner's seconds join those by section."""
        learned, rollouts = self.learned, [each.rollout for each in self.rounds]
        completions = [each for rollout in rollouts for each in rollout.completions]
        report, groups = join_reports([each.report for each in rollouts]), self.groups
        failures = sum(len(each.graded.failures) for each in self.rounds)
        spots = [spot for rollout in rollouts for spot in rollout.spots]
        return {
            **group_metrics(self.rollouts, failures, groups),
            "rollout/rounds": float(len(self.rounds)),
            "rollout/left_out_groups": float(len(groups) - self.num_learned),
            **rollout_metrics(report, completions, self.series),
            **episode_metrics(completions),
            **learned.metrics,
            "training/policy_version": float(learned.version),
            **{f"timing_s/{name}": s for name, s in {**self.seconds, **learned.seconds}.items()},
            "cluster/reused_share": reused_share(spots),
        }


def reused_share(spots: Sequence[SpotReport]) -> float:
    """Return the share of spot training tokens whose features the worker's engine had kept."""
    trained = sum(spot.num_tokens for spot in spots)
    return sum(spot.num_reused for spot in spots) / trained if trained else 0.0


def rollout_metrics(
    report: RolloutReport, completions: Sequence[Completion], series: RolloutSeries | None = None
) -> dict[str, float]:
    """Return the metrics of a rollout, those that its generator measured.

    A speculating generator has `series`.
    """
    cut = sum(each.finish_reason is FinishReason.LENGTH for each in completions)
    lengths = [each.num_generated for each in completions]
    # lengths that occur
    p50, p90, p99 = map(float, np.percentile(lengths, (50, 90, 99), method="inverted_cdf"))
    metrics = {
        "response_length/mean": fmean(lengths),
        "response_length/p50": p50,
        "response_length/p90": p90,
        "response_length/p99": p99,
        "response_length/max": float(max(lengths)),
        "response_length/clip_ratio": cut / len(completions),
        "response_length/max_over_median": max(lengths) / max(p50, 1.0),
        "rollout/generated_tokens": float(report.num_generated),
        "rollout/tokens_per_s": report.tokens_per_s,
        "rollout/tail_idle_share": report.tail_idle_share,
        "rollout/bookkeeping_share": report.bookkeeping_share,
    }
    if report.num_verified:
        num_emitted = report.num_accepted + report.num_verified
        metrics |= {
            "speculation/accept_length": report.accept_length,
            "speculation/accepted_share": report.num_accepted / max(report.num_drafted, 1),
            "speculation/emitted_share": num_emitted / max(report.num_generated, 1),
            "speculation/draft_share": report.draft_share,
        }
    if report.num_verified_later:
        metrics["speculation/accept_length_later_turns"] = report.accept_length_later
    if series is not None:
        metrics |= {
            "speculation/tuner_share": report.tuner_share,
            "speculation/switches": float(len(series.switches)),
            "speculation/nodes_per_step": series.mean_nodes,
        }
    return {name: value for name, value in metrics.items() if not math.isnan(value)}


def group_metrics(
    rollouts: Sequence[Rollout], failures: int, groups: Sequence[Group]
) -> dict[str, float]:
    """Return the metrics of rewards, of all and of each task of reasoning-gym.

    Failures are counted apart and have no reward.
    """
    informative = sum(len({r.reward for r in group.rollouts}) > 1 for group in groups)
    rewards = np.array([rollout.reward for rollout in rollouts])
    tasks: dict[str, list[float]] = {}
    for rollout in rollouts:
        if (task := rollout.prompt.data.get(TASK)) is not None:
            tasks.setdefault(task, []).append(rollout.reward)
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/min": float(rewards.min()),
        "reward/max": float(rewards.max()),
        "reward/failures": float(failures),
        "reward/informative_groups": informative / max(len(groups), 1),
        **{f"task/{task}/reward": fmean(each) for task, each in sorted(tasks.items())},
    }


def rollout_row(rollout: Rollout) -> dict[str, Any]:
    """Return one line of rollouts.jsonl."""
    completion, episode = rollout.completion, rollout.completion.episode
    more = {} if episode is None else _episode_row(episode)
    return {
        "prompt_id": rollout.prompt.prompt_id,
        "request_id": completion.request_id,
        "policy_version": completion.policy_version,
        "reward": rollout.reward,
        "num_tokens": completion.num_generated,
        "finish_reason": completion.finish_reason.value,
        "logprob": sum(completion.logprobs),
        "prompt": rollout.prompt.text if episode is None else episode.prompt,
        "text": completion.text,
        **more,
    }


def _episode_row(episode: Episode) -> dict[str, Any]:
    names = ("messages", "rewards", "num_calls", "num_bad_calls")
    return {name: getattr(episode, name) for name in names}


def episode_metrics(completions: Sequence[Completion]) -> dict[str, float]:
    """Return the metrics of episodes; none if completions have one turn."""
    found = [(each, each.episode) for each in completions if each.episode is not None]
    if not found:
        return {}
    episodes = [episode for _, episode in found]
    return {
        "environment/turns": fmean(
            sum(m["role"] == "assistant" for m in each.messages) for each in episodes
        ),
        "environment/calls": float(sum(each.num_calls for each in episodes)),
        "environment/bad_calls": float(sum(each.num_bad_calls for each in episodes)),
        "environment/failures": float(sum(bool(each.problem) for each in episodes)),
        "timing_s/environment": fmean(each.waited_s for each in episodes),
        "environment/observed_tokens": float(
            sum(len(each.tokens) - each.num_generated for each, _ in found)
        ),
    }
