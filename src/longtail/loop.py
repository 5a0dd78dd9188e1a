"""Reinforcement learning, the whole system on one page.

    source --Prompt--> engine --Completion--> grader --Rollout--> learner --PolicyWeights--> engine

Records flow one way; no part holds a reference to the next. A step is complete when its weights are
published. A checkpoint is the state between two steps, so whatever interrupts a step costs that
step only, and a resumed run is the run that was not interrupted.
"""

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from longtail.assemble import DTYPES, assemble, model_directory, save_policy, set_threads
from longtail.card import make_card, read_metrics
from longtail.checkpoint import Checkpoint, RunDirectory
from longtail.config import RunConfig, dump
from longtail.console import Console
from longtail.engine.report import RolloutMeter, RolloutReport, StepReport
from longtail.errors import GradingError
from longtail.interrupt import Interrupted, Interruption, interruptible
from longtail.metrics import JsonLines, MetricWriter, Stopwatch, open_writers
from longtail.model import hf
from longtail.rl.advantage import keep_informative, shaped_rewards
from longtail.rl.data import Taken
from longtail.rl.grading import Graded, GraderPool
from longtail.rl.learner import LearnerState
from longtail.rl.loss import LOSSES
from longtail.rl.packing import pack_mini_batches
from longtail.sampling import noise_key
from longtail.step_metrics import rollout_row, step_metrics
from longtail.types import Completion, Group, Prompt, Request, TrainBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a run stands between two steps; with the learner's state, all that a resume needs."""

    step: int
    """Steps completed."""
    cursor: dict[str, Any]
    reward_before: float | None
    seconds: float
    """Wall time of earlier sittings."""
    warm_start_s: float


def train(config: RunConfig) -> int:
    """Run `longtail train`: from the configuration to the card; 130 if interrupted."""
    console = Console()
    run = RunDirectory(Path(config.run.dir), keep=config.run.keep_checkpoints)
    checkpoint = run.start(dump(config), resume=config.run.resume)
    try:
        with (
            GraderPool(
                config.reward.name,
                workers=config.reward.workers,
                timeout_s=config.reward.timeout_s,
            ) as grader,
            interruptible() as interruption,
        ):
            return Trainer(config, run, checkpoint, grader, console, interruption).run()
    finally:
        run.close()


class Trainer:
    """One sitting of a run: owns the order of things and nothing else."""

    def __init__(
        self,
        config: RunConfig,
        run: RunDirectory,
        checkpoint: Checkpoint | None,
        grader: GraderPool,
        console: Console,
        interruption: Interruption,
    ) -> None:
        self._began = time.perf_counter()
        self._config, self._run, self._grader = config, run, grader
        self._console, self._interruption = console, interruption
        threads = set_threads(config.run.threads)
        directory = model_directory(config.model.path)
        warm_start_s = time.perf_counter() - self._began
        self._parts = assemble(config, directory)
        self._progress = Progress(
            step=0,
            cursor=self._parts.source.state(),
            reward_before=None,
            seconds=0.0,
            warm_start_s=warm_start_s if warm_start_s > 1.0 else 0.0,
        )
        if checkpoint is not None:
            self._progress = self._restore(checkpoint)
        last_step = None if checkpoint is None else checkpoint.step
        self._metrics: MetricWriter = open_writers(
            config.run.writers, run.path, last_step=last_step, config=config.model_dump()
        )
        self._rollouts = JsonLines(run.path / "rollouts.jsonl", last_step=last_step)
        self._saved_step = self._progress.step
        grader.wait_ready()
        console.say(
            f"{config.model.path}: {sum(p.numel() for p in self._parts.policy.parameters()):,} "
            f"parameters, {config.learner.loss}, {threads} threads, run directory {run.path}"
            + (f", resumed after step {last_step}" if last_step is not None else "")
        )

    def run(self) -> int:
        """Evaluate, step, evaluate, show the card."""
        try:
            self._parts.engine.pull(self._parts.learner.weights())
            if self._progress.step == 0:
                self._progress = replace(self._progress, reward_before=self._evaluate())
            while self._progress.step < self._config.run.steps:
                self._progress = self._step(self._progress)
                self._maybe_checkpoint()
            return self._finish(self._evaluate())
        except Interrupted:
            self._checkpoint()
            self._console.say(
                f"stopped after step {self._progress.step}; the same command goes on from there"
            )
            return 130
        finally:
            self._metrics.close()
            self._rollouts.close()

    def _step(self, before: Progress) -> Progress:
        """One step: write, grade, learn, publish."""
        parts, watch, step = self._parts, Stopwatch(), before.step + 1
        taken = parts.source.take(self._config.rollout.prompts_per_step)
        requests, prompts = self._requests(taken)
        with watch.section("rollout"):
            completions, rollout = self._generate(f"step {step}", requests)
        with watch.section("reward"):
            graded = self._grade(completions, prompts)
        groups = regroup(graded)
        learned = parts.learner.step(self._batches(groups))
        with watch.section("publish"):
            parts.engine.pull(parts.learner.weights())
        for each in graded.rollouts if self._config.run.save_rollouts else ():
            self._rollouts.append(step, rollout_row(each))
        seconds = watch.lap() | {
            "logprob": learned.logprob_seconds,
            "update": learned.update_seconds,
        }
        metrics = step_metrics(
            rollout=rollout,
            completions=completions,
            graded=graded,
            groups=groups,
            learned=learned,
            seconds=seconds,
        )
        every = self._config.eval.every
        if every and step % every == 0 and step < self._config.run.steps:
            metrics["eval/reward_mean"] = self._evaluate() or 0.0
        self._metrics.write(step, metrics)
        self._console.step(step, self._config.run.steps, metrics)
        return replace(before, step=step, cursor=parts.source.state())

    def _requests(self, taken: Sequence[Taken]) -> tuple[list[Request], dict[str, Prompt]]:
        """Ask for a group of completions of each prompt."""
        seed, size = self._config.run.seed, self._config.rollout.group_size
        requests: list[Request] = []
        prompts: dict[str, Prompt] = {}
        for each in taken:
            group_id = f"{each.prompt.prompt_id}@{each.epoch}"
            for sample in range(size):
                request = Request(
                    request_id=f"{group_id}#{sample}",
                    prompt_tokens=each.prompt.tokens,
                    noise_key=noise_key(seed, each.prompt.prompt_id, each.epoch, sample),
                    sampling=self._parts.sampling,
                    group_id=group_id,
                )
                requests.append(request)
                prompts[request.request_id] = each.prompt
        return requests, prompts

    def _generate(
        self, label: str, requests: Sequence[Request]
    ) -> tuple[list[Completion], RolloutReport]:
        meter = RolloutMeter()
        self._console.begin_rollout(label, len(requests))

        def on_step(report: StepReport) -> None:
            meter.add(report)
            self._console.rollout_step(report)
            self._interruption.check()

        return self._parts.engine.generate(requests, on_step), meter.report()

    def _grade(self, completions: Sequence[Completion], prompts: dict[str, Prompt]) -> Graded:
        graded = self._grader.grade([(prompts[each.request_id], each) for each in completions])
        if completions and not graded.rollouts:
            raise GradingError(
                f"all {len(completions)} completions of this step failed to grade, the first with: "
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
        )

    def _evaluate(self) -> float | None:
        """Mean reward on held-out problems, always with the same noise; None without problems."""
        if not self._parts.heldout:
            return None
        requests: list[Request] = []
        prompts: dict[str, Prompt] = {}
        for prompt in self._parts.heldout:
            for sample in range(self._config.eval.samples):
                key = noise_key(self._config.run.seed, "eval", prompt.prompt_id, sample)
                request = Request(
                    request_id=f"eval/{prompt.prompt_id}#{sample}",
                    prompt_tokens=prompt.tokens,
                    noise_key=key,
                    sampling=self._parts.sampling,
                    group_id=prompt.prompt_id,
                )
                requests.append(request)
                prompts[request.request_id] = prompt
        completions, _ = self._generate("held-out evaluation", requests)
        rewards = [each.reward for each in self._grade(completions, prompts).rollouts]
        mean = sum(rewards) / len(rewards)
        self._console.say(
            f"held-out reward after step {self._progress.step}: {mean:.3f} "
            f"({len(self._parts.heldout)} problems x {self._config.eval.samples})"
        )
        return mean

    def _restore(self, checkpoint: Checkpoint) -> Progress:
        """Go to where a checkpoint was taken."""
        state = checkpoint.state
        dtype: torch.dtype = DTYPES[self._config.learner.dtype]
        saved = hf.load_model(checkpoint.policy, dtype)
        self._parts.learner.restore(
            LearnerState(tensors=checkpoint.tensors(), numbers=state["learner"]),
            dict(saved.named_parameters()),
        )
        self._parts.source.restore(state["cursor"])
        return Progress(step=checkpoint.step, **{k: state[k] for k in _KEPT})

    def _maybe_checkpoint(self) -> None:
        step = self._progress.step
        if step % self._config.run.checkpoint_every == 0 or step == self._config.run.steps:
            self._checkpoint()

    def _checkpoint(self) -> None:
        """Save the state between two steps, unless that is on disk already."""
        progress = self._progress
        if progress.step == self._saved_step:
            return
        learner = self._parts.learner.state()
        state = {name: value for name, value in _as_dict(progress).items() if name != "step"}
        state["seconds"] = progress.seconds + time.perf_counter() - self._began
        self._run.save(
            progress.step,
            lambda path: save_policy(self._parts, path),
            learner.tensors,
            {**state, "learner": dict(learner.numbers)},
        )
        self._saved_step = progress.step

    def _finish(self, reward_after: float | None) -> int:
        card = make_card(
            read_metrics(self._run.path / "metrics.jsonl"),
            reward_before=self._progress.reward_before,
            reward_after=reward_after,
            seconds=self._progress.seconds + time.perf_counter() - self._began,
            warm_start_s=self._progress.warm_start_s,
        )
        card.write(self._run.path / "card.json")
        self._console.card(card, self._run.path)
        return 0


_KEPT = ("cursor", "reward_before", "seconds", "warm_start_s")


def _as_dict(progress: Progress) -> dict[str, Any]:
    return {
        "step": progress.step,
        "cursor": progress.cursor,
        "reward_before": progress.reward_before,
        "seconds": progress.seconds,
        "warm_start_s": progress.warm_start_s,
    }


def regroup(graded: Graded) -> list[Group]:
    """Collect the rollouts of each prompt visit, in order of first appearance."""
    by_visit: dict[str, list[Any]] = defaultdict(list)
    for rollout in graded.rollouts:
        by_visit[rollout.completion.request_id.rpartition("#")[0]].append(rollout)
    return [Group(prompt=r[0].prompt, rollouts=tuple(r)) for r in by_visit.values()]
