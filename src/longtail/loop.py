"""Reinforcement learning, the whole system on one page.

    source --Prompt--> workers --Completion--> grader --Rollout--> batches --> workers
                       (generate)                                              (learn, publish)

The `WorkerGroup` is one worker in this process or many in others: each has an engine and a share of
the learner, and trains the drafter while it would be idle. Records flow one way; no part holds a
reference to the next. A step is complete when its weights are published. A checkpoint is the state
between two steps, so whatever interrupts a step costs that step only, and a resumed run is the run
that was not interrupted.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from longtail.build.trainer import assemble, model_directory
from longtail.cluster.records import Progress
from longtail.cluster.rollout import RolloutResult
from longtail.cluster.timeline import Timeline
from longtail.config import files as configfile
from longtail.config.rl import RunConfig
from longtail.engine.rollout_log import EVALUATION, TRAINING
from longtail.errors import GradingError, NonFiniteError
from longtail.report.page import report_if_possible
from longtail.rl.advantage import keep_informative, shaped_rewards
from longtail.rl.data.requests import (
    RequestBatch,
    eval_requests,
    probe_requests,
    regroup,
    train_requests,
)
from longtail.rl.grading.pool import Graded, GraderPool
from longtail.rl.learner import LearnerState
from longtail.rl.loss import LOSSES
from longtail.rl.packing import pack_mini_batches
from longtail.run.checkpoint import Checkpoint, RunDirectory
from longtail.run.console import Console
from longtail.run.drafter_store import INITIAL, DrafterStore
from longtail.run.logger import RunLogger
from longtail.run.metrics import Stopwatch
from longtail.run.step_metrics import step_metrics
from longtail.run.summary import finished_summary, read_metrics, summarize_run
from longtail.system.device import set_threads, threads_each
from longtail.system.interrupt import Interrupted, Interruption
from longtail.types import Completion, Group, TrainBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """Where a run stands between two steps; with the learner's state, all that a resume needs."""

    step: int
    """Steps completed."""
    cursor: Mapping[str, Any]
    """Of the prompt source."""
    seconds: float
    """Wall time of earlier sittings."""
    warm_start_s: float


def train(config: RunConfig) -> int:
    """Run `longtail train`: from the configuration to the card; 130 if interrupted."""
    console = Console()
    with RunDirectory(Path(config.run.dir), keep=config.run.keep_checkpoints) as run:
        checkpoint = run.start(configfile.render(config), resume=config.run.resume)
        if card := finished_summary(run.path, checkpoint, config.run.steps):
            console.log(f"{run.path}: its {card.steps} steps are done; raise run.steps to go on")
            console.summary(card, run.path)
            return 0
        with GraderPool(
            config.reward.name, workers=config.reward.workers, timeout_s=config.reward.timeout_s
        ) as grader:
            return Trainer(config, run, checkpoint, grader, console).run()


class Trainer:
    """One sitting of a run: owns the order of things and nothing else."""

    def __init__(
        self,
        config: RunConfig,
        run: RunDirectory,
        checkpoint: Checkpoint | None,
        grader: GraderPool,
        console: Console,
    ) -> None:
        self._began = time.perf_counter()
        self._config, self._run, self._grader, self._console = config, run, grader, console
        self._interruption = Interruption()
        self.timeline: Timeline | None = None
        """What the workers did in the last step."""
        threads = set_threads(threads_each(config.run.threads, config.cluster.workers))
        directory = model_directory(config.model.path, console.log)
        warm_start_s = time.perf_counter() - self._began
        self._parts = assemble(config, directory, grader.check, console.log, self._listen)
        self.workers = self._parts.workers
        """All workers as one."""
        try:
            self._prepare(checkpoint, warm_start_s, threads)
        except BaseException:
            self.workers.close()
            raise

    def _prepare(self, checkpoint: Checkpoint | None, warm_start_s: float, threads: int) -> None:
        """Put everything where the run begins, or goes on."""
        config, run, console = self._config, self._run, self._console
        self._drafters = DrafterStore(run.path / "drafter", keep=config.run.keep_checkpoints)
        if self.workers.published is not None:
            self.workers.save_drafter(run.path / "drafter" / INITIAL)
        if checkpoint is None and config.speculation.tuner != "off":
            self._probe_drafter()
        warm_start_s += self._parts.drafter_s
        self._progress = TrainerState(
            step=0,
            cursor=self._parts.source.state(),
            seconds=0.0,
            warm_start_s=warm_start_s if warm_start_s > 1.0 else 0.0,
        )
        if checkpoint is not None:
            self._restore(checkpoint)
            kept = {name: checkpoint.state[name] for name in ("cursor", "seconds", "warm_start_s")}
            self._progress = TrainerState(step=checkpoint.step, **kept)
        self._saved_step = self._progress.step
        self._grader.wait_ready()
        last_step = None if checkpoint is None else checkpoint.step
        self._journal = RunLogger(config, run.path, last_step=last_step)
        console.log(
            f"{config.model.path}: {self.workers.num_parameters:,} parameters, "
            f"{config.learner.loss}, {config.cluster.workers} x {threads} threads, run directory "
            f"{run.path}" + (f", resumed after step {last_step}" if last_step is not None else "")
        )
        if dropped := self._parts.num_dropped:
            console.log(
                f"{dropped} prompts over {config.data.max_prompt_len} tokens are left out "
                "(data.drop_long_prompts)"
            )
        if ungradable := self._parts.num_ungradable:
            console.log(f"{ungradable} prompts are left out (data.drop_ungradable)")

    def run(self) -> int:
        """Step until all steps are done, evaluate, show the card."""
        try:
            with self._interruption:
                self.begin()
                while self._progress.step < self._config.run.steps:
                    self.advance()
                    self._checkpoint_if_due()
                self._finish(self._evaluate())
                return 0
        except Interrupted:
            self._checkpoint()
            self._console.log(_farewell(self._progress.step))
            return 130
        except NonFiniteError as error:
            raise NonFiniteError(self._post_mortem(error)) from error
        finally:
            self.close()

    def begin(self) -> None:
        """Hand the policy to everybody who writes."""
        self.workers.publish()

    def close(self) -> None:
        """Write out what is pending and end the workers."""
        self._journal.close()
        self.workers.close()
        self._drafters.wait()

    def advance(self) -> dict[str, float]:
        """Make one step: write, grade, learn, publish; return its numbers."""
        config, parts, before = self._config, self._parts, self._progress
        step = before.step + 1
        evaluated = self._evaluate() if self._evaluation_is_due(before.step) else {}
        self._journal.trace(step, self.workers.drain_timeline())
        watch = Stopwatch()
        batch = train_requests(
            parts.source.take(config.rollout.prompts_per_step),
            samples=config.rollout.group_size,
            seed=config.run.seed,
            sampling=parts.sampling,
        )
        with watch.section("rollout"):
            rolled = self._generate(f"step {step}", batch, TRAINING)
        with watch.section("reward"):
            graded = self._grade(batch, rolled.completions)
        groups = regroup(graded.rollouts)
        learned = self.workers.learn(self._batches(groups))
        with watch.section("publish"):
            self.workers.publish()
        with watch.section("drafter"):
            self.workers.offer_drafter()
        metrics = step_metrics(
            rollout=rolled.report,
            series=rolled.series,
            completions=rolled.completions,
            graded=graded,
            groups=groups,
            learned=learned,
            seconds=watch.lap(),
        )
        self.timeline = timeline = self.workers.drain_timeline()
        metrics |= timeline.metrics() | {"cluster/reused_share": rolled.reused_share}
        self._journal.write(step, evaluated | metrics, graded.rollouts, rolled.costs)
        self._journal.log_workers(step, timeline, self.workers.drain_decisions())
        self._console.step(step, config.run.steps, metrics, rolled.series)
        self._progress = replace(before, step=step, cursor=parts.source.state())
        return metrics

    def _generate(self, label: str, batch: RequestBatch, kind: str) -> RolloutResult:
        """Write the completions; between two tokens is where a run may stop."""
        self._console.begin_rollout(label, len(batch.requests))
        step = self._progress.step + 1
        try:
            rolled = self.workers.rollout(step, batch.requests, trains=kind == TRAINING)
        except Interrupted:
            self.workers.abandon()
            raise
        for logged in rolled.logged(step, kind):
            self._journal.log(logged)
        return rolled

    def _listen(self, progress: Progress) -> None:
        """Hear how a rollout goes on; here it may be interrupted."""
        self._console.rollout_progress(progress)
        self._interruption.check()

    def _grade(self, batch: RequestBatch, completions: Sequence[Completion]) -> Graded:
        graded = self._grader.grade(list(zip(batch.prompts, completions, strict=True)))
        if not graded.rollouts:
            raise GradingError(
                f"all {len(completions)} completions failed to grade, the first with: "
                f"{graded.failures[0].error}; mend reward.name = {self._config.reward.name!r}, "
                "then start again: the run resumes from its newest checkpoint"
            )
        return graded

    def _batches(self, groups: Sequence[Group]) -> list[TrainBatch]:
        """Turn groups into packed mini-batches with advantages."""
        config, spec = self._config.learner, LOSSES[self._config.learner.loss]
        chosen = config.dynamic_sampling
        if spec.dynamic_sampling if chosen is None else chosen:
            groups = keep_informative(groups)
        rewards = shaped_rewards(
            groups, max_tokens=self._parts.sampling.max_tokens, buffer=config.overlong_buffer
        )
        return pack_mini_batches(
            [rollout for group in groups for rollout in group.rollouts],
            [value for group in spec.advantages(rewards) for value in group],
            sampling=self._parts.sampling,
            budget=config.tokens_per_micro_batch,
            mini_batches=config.mini_batches,
            keep_idle=config.kl_coef > 0,
        )

    def _evaluation_is_due(self, after: int) -> bool:
        every = self._config.eval.every
        return after == 0 or (every > 0 and after % every == 0)

    def _evaluate(self) -> dict[str, float]:
        """Reward the present policy on held-out problems, always with the same noise."""
        if not self._parts.heldout:
            return {}
        batch = eval_requests(
            self._parts.heldout,
            samples=self._config.eval.samples,
            seed=self._config.run.seed,
            sampling=self._parts.sampling,
        )
        rolled = self._generate("held-out evaluation", batch, EVALUATION)
        graded = self._grade(batch, rolled.completions)
        mean = fmean(rollout.reward for rollout in graded.rollouts)
        self._console.log(
            f"held-out reward after step {self._progress.step}: {mean:.3f} "
            f"({len(self._parts.heldout)} problems x {self._config.eval.samples}"
            + (f", {len(graded.failures)} ungraded)" if graded.failures else ")")
        )
        return {"eval/reward_mean": mean, "eval/failures": float(len(graded.failures))}

    def _probe_drafter(self) -> None:
        """Say what the drafter that was given is worth here."""
        batch = probe_requests(
            self._parts.heldout or self._parts.source.prompts,
            seed=self._config.run.seed,
            sampling=self._parts.sampling,
        )
        found = self.workers.probe_drafter(batch.requests)
        for line in [] if found is None else found.lines(self._config.spot.train):
            self._console.log(line)

    def _restore(self, checkpoint: Checkpoint) -> None:
        """Put learners, prompt source and drafter where they were when it was taken."""
        learner = LearnerState(tensors=checkpoint.tensors(), numbers=checkpoint.state["learner"])
        self.workers.restore(checkpoint.policy, learner)
        self._parts.source.restore(checkpoint.state["cursor"])
        if self.workers.published is not None and (kept := self._drafters.load(checkpoint.step)):
            self.workers.restore_drafter(kept)

    def _checkpoint_if_due(self) -> None:
        step = self._progress.step
        if step % self._config.run.checkpoint_every == 0 or step == self._config.run.steps:
            self._checkpoint()

    def _checkpoint(self) -> None:
        """Save the state between two steps, unless that is on disk already."""
        progress = self._progress
        if progress.step == self._saved_step:
            return
        learner = self.workers.learner_state()
        state = {
            "cursor": dict(progress.cursor),
            "seconds": self._seconds(),
            "warm_start_s": progress.warm_start_s,
            "learner": dict(learner.numbers),
        }
        self._run.save(progress.step, self.workers.save_policy, learner.tensors, state)
        if (drafter := self.workers.drafter_state()) is not None:
            self._drafters.save(progress.step, drafter)
        self._saved_step = progress.step

    def _seconds(self) -> float:
        """Wall time of all sittings so far."""
        return self._progress.seconds + time.perf_counter() - self._began

    def _finish(self, evaluated: Mapping[str, float]) -> None:
        """Make the card, keep it and show it."""
        card = summarize_run(
            read_metrics(self._run.path / "metrics.jsonl"),
            steps=self._progress.step,
            reward_after=evaluated.get("eval/reward_mean"),
            seconds=self._seconds(),
            warm_start_s=self._progress.warm_start_s,
        )
        card.write(self._run.path / "summary.json")
        report_if_possible(self._run.path, self._console.log)
        self._console.summary(card, self._run.path)

    def _post_mortem(self, error: NonFiniteError) -> str:
        """Say when numbers broke, and what is left to go on from."""
        saved = self._run.checkpoints / f"step_{self._saved_step:06d}" / "policy"
        source = saved if self._saved_step else self._config.model.path
        return (
            f"stopped in step {self._progress.step + 1} of {self._config.run.steps}: {error}; "
            f"checkpoints stay; begin another run.dir with model.path = {str(source)!r} and a "
            "lower learner.learning_rate"
        )


def _farewell(step: int) -> str:
    if step == 0:
        return "stopped before the first step was complete; the same command begins again"
    return f"stopped after step {step}; the same command goes on from there"
