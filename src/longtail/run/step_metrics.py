"""What one step is summed up to: records in, named numbers out (verl's names where it has one)."""

from collections.abc import Mapping, Sequence
from typing import Any

from longtail.engine.report import RolloutReport
from longtail.engine.rollout_log import RolloutSeries
from longtail.rl.grading.pool import Graded
from longtail.rl.learner_metrics import LearnerReport
from longtail.run.metrics import summarize, summarize_lengths, timing
from longtail.types import Completion, FinishReason, Group, Rollout


def rollout_metrics(
    report: RolloutReport, completions: Sequence[Completion], series: RolloutSeries | None = None
) -> dict[str, float]:
    """Sum up the rollout phase; `series` is of an engine that speculates."""
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
    """Sum up drafting; absent from a step in which nothing was drafted."""
    return {
        "speculation/accept_length": report.accept_length,
        "speculation/accepted_share": report.num_accepted / max(report.num_drafted, 1),
        "speculation/emitted_share": (report.num_accepted + report.num_verified)
        / max(report.num_generated, 1),
        "speculation/draft_share": report.draft_share,
    }


def _tuner_metrics(report: RolloutReport, series: RolloutSeries) -> dict[str, float]:
    """Sum up what was decided, also where that was to draft nothing."""
    return {
        "speculation/tuner_share": report.tuner_share,
        "speculation/switches": float(len(series.switches)),
        "speculation/nodes_per_step": series.mean_nodes,
    }


def group_metrics(graded: Graded, groups: Sequence[Group]) -> dict[str, float]:
    """Sum up rewards; failures are counted beside them, never among them."""
    informative = sum(len({r.reward for r in group.rollouts}) > 1 for group in groups)
    components: dict[str, list[float]] = {}
    for rollout in graded.rollouts:
        for name, value in rollout.components.items():
            components.setdefault(f"reward/{name}", []).append(value)
    return {
        **summarize("reward", [rollout.reward for rollout in graded.rollouts]),
        **{name: sum(values) / len(values) for name, values in components.items()},
        "reward/failures": float(len(graded.failures)),
        "reward/informative_groups": informative / max(len(groups), 1),
    }


def step_metrics(
    *,
    rollout: RolloutReport,
    completions: Sequence[Completion],
    graded: Graded,
    groups: Sequence[Group],
    learned: LearnerReport,
    seconds: Mapping[str, float],
    series: RolloutSeries | None = None,
) -> dict[str, float]:
    """Return every number of one step; `seconds` by section, the learner's own join them."""
    learning = {"logprob": learned.logprob_seconds, "update": learned.update_seconds}
    return {
        **group_metrics(graded, groups),
        **rollout_metrics(rollout, completions, series),
        **learned.metrics,
        "training/policy_version": float(learned.version),
        **timing({**seconds, **learning}),
    }


def rollout_row(rollout: Rollout) -> dict[str, Any]:
    """One line of rollouts.jsonl."""
    completion = rollout.completion
    return {
        "prompt_id": rollout.prompt.prompt_id,
        "request_id": completion.request_id,
        "policy_version": completion.policy_version,
        "reward": rollout.reward,
        "num_tokens": len(completion.tokens),
        "finish_reason": completion.finish_reason.value,
        "logprob": sum(completion.logprobs),
        "text": completion.text,
    }
