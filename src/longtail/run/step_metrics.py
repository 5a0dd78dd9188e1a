"""Metrics of one training step, under verl's names where verl has them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from longtail.cluster.rollout import RolloutResult, reused_share
from longtail.engine.report import RolloutReport, join_reports
from longtail.engine.rollout_log import RolloutSeries
from longtail.rl.data.requests import regroup
from longtail.rl.data.sources import TASK
from longtail.rl.grading.pool import Graded
from longtail.rl.learner_metrics import LearnerReport
from longtail.run.metrics import summarize, summarize_lengths, timing
from longtail.types import Completion, FinishReason, Group, Rollout


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
        learning = {"logprob": learned.logprob_seconds, "update": learned.update_seconds}
        completions = [each for rollout in rollouts for each in rollout.completions]
        report, groups = join_reports([each.report for each in rollouts]), self.groups
        failures = sum(len(each.graded.failures) for each in self.rounds)
        spots = [spot for rollout in rollouts for spot in rollout.spots]
        return {
            **group_metrics(self.rollouts, failures, groups),
            "rollout/rounds": float(len(self.rounds)),
            "rollout/left_out_groups": float(len(groups) - self.num_learned),
            **rollout_metrics(report, completions, self.series),
            **learned.metrics,
            "training/policy_version": float(learned.version),
            **timing({**self.seconds, **learning}),
            "cluster/reused_share": reused_share(spots),
        }


def rollout_metrics(
    report: RolloutReport, completions: Sequence[Completion], series: RolloutSeries | None = None
) -> dict[str, float]:
    """Return the metrics of a rollout; a speculating engine has `series`."""
    cut = sum(each.finish_reason is FinishReason.LENGTH for each in completions)
    lengths = summarize_lengths([len(each.tokens) for each in completions])
    return {
        **lengths,
        "response_length/clip_ratio": cut / max(len(completions), 1),
        "response_length/max_over_median": lengths["response_length/max"]
        / max(lengths["response_length/p50"], 1.0),
        "rollout/generated_tokens": float(report.num_generated),
        "rollout/tokens_per_s": report.tokens_per_s,
        "rollout/tail_idle_share": report.tail_idle_share,
        "rollout/bookkeeping_share": report.bookkeeping_share,
        **(_draft_metrics(report) if report.num_verified else {}),
        **({} if series is None else _tuner_metrics(report, series)),
    }


def _draft_metrics(report: RolloutReport) -> dict[str, float]:
    """Return the metrics of drafting, for a step that drafted."""
    return {
        "speculation/accept_length": report.accept_length,
        "speculation/accepted_share": report.num_accepted / max(report.num_drafted, 1),
        "speculation/emitted_share": (report.num_accepted + report.num_verified)
        / max(report.num_generated, 1),
        "speculation/draft_share": report.draft_share,
    }


def _tuner_metrics(report: RolloutReport, series: RolloutSeries) -> dict[str, float]:
    """Return the metrics of the tuner's decisions."""
    return {
        "speculation/tuner_share": report.tuner_share,
        "speculation/switches": float(len(series.switches)),
        "speculation/nodes_per_step": series.mean_nodes,
    }


def group_metrics(
    rollouts: Sequence[Rollout], failures: int, groups: Sequence[Group]
) -> dict[str, float]:
    """Return the metrics of rewards; failures are counted apart and have no reward."""
    informative = sum(len({r.reward for r in group.rollouts}) > 1 for group in groups)
    components: dict[str, list[float]] = {}
    for rollout in rollouts:
        for name, value in rollout.components.items():
            components.setdefault(f"reward/{name}", []).append(value)
    return {
        **summarize("reward", [rollout.reward for rollout in rollouts]),
        **{name: sum(values) / len(values) for name, values in components.items()},
        "reward/failures": float(failures),
        "reward/informative_groups": informative / max(len(groups), 1),
        **task_metrics(rollouts),
    }


def task_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the mean reward of each task of reasoning-gym; none for other prompts."""
    tasks: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        if (task := rollout.prompt.data.get(TASK)) is not None:
            tasks.setdefault(task, []).append(rollout)
    return {
        f"task/{task}/reward": fmean(rollout.reward for rollout in own)
        for task, own in sorted(tasks.items())
    }


def rollout_row(rollout: Rollout) -> dict[str, Any]:
    """Return one line of rollouts.jsonl."""
    completion = rollout.completion
    return {
        "prompt_id": rollout.prompt.prompt_id,
        "request_id": completion.request_id,
        "policy_version": completion.policy_version,
        "reward": rollout.reward,
        "num_tokens": len(completion.tokens),
        "finish_reason": completion.finish_reason.value,
        "logprob": sum(completion.logprobs),
        "prompt": rollout.prompt.text,
        "text": completion.text,
    }
