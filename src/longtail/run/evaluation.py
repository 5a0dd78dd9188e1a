"""The held-out reward of a run."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from longtail.cluster.group import WorkerGroup
from longtail.config.rl import RunConfig
from longtail.engine.rollout_log import EVALUATION
from longtail.errors import GradingError
from longtail.rl.data.prompts import Taken
from longtail.rl.data.requests import requests_of
from longtail.rl.grading.pool import Graded, GraderPool
from longtail.run.console import Console
from longtail.types import Prompt, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    """Evaluates the policy on held-out problems, always with the same sampling noise."""

    config: RunConfig
    workers: WorkerGroup
    heldout: Sequence[Prompt]
    sampling: SamplingParams
    grader: GraderPool
    console: Console

    def evaluate(self, step: int) -> tuple[dict[str, float], Sequence[dict[str, Any]]]:
        """Return the mean reward after `step` steps, and the lines of its speculation.

        Both are empty without held-out problems.
        """
        if not self.heldout:
            return {}, ()
        samples = self.config.eval.samples
        requests = requests_of(
            (Taken(prompt=each, epoch=None) for each in self.heldout),
            samples=samples,
            seed=self.config.run.seed,
            sampling=self.sampling,
            with_rows=self.config.environment.is_on,
        )
        with self.console.phase("held-out evaluation", total=len(requests.requests)):
            rollout = self.workers.rollout(step + 1, requests.requests, trains=False)
        with self.console.phase("grading"):
            pairs = list(zip(requests.prompts, rollout.completions, strict=True))
            graded = some_graded(self.grader.grade(pairs), self.config.reward.name)
        mean, failures = fmean(each.reward for each in graded.rollouts), len(graded.failures)
        self.console.log(
            f"held-out reward after step {step}: {mean:.3f} ({len(self.heldout)} problems x "
            f"{samples}" + (f", {failures} ungraded)" if failures else ")")
        )
        metrics = {"eval/reward_mean": mean, "eval/failures": float(failures)}
        return metrics, rollout.logged(EVALUATION)


def some_graded(graded: Graded, reward: str) -> Graded:
    """Return the grades. Raises GradingError if no completion could be graded."""
    if not graded.rollouts:
        raise GradingError(
            f"all {len(graded.failures)} completions failed to grade, the first with: "
            f"{graded.failures[0].error}; correct what reward.name = {reward!r} computes, or the "
            "data, then start again: a run with a checkpoint goes on from it, and keeps the name"
        )
    return graded
