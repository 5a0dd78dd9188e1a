"""Reinforcement learning: the training loop of `longtail train`.

    prompts --> requests --> rollout --> grade --> batches --> learn --> publish --> next step
          ^                  engines     graders |            learners   learner -> engines
          `------ refill (dynamic sampling) -----'

Groups are graded, and learned from by idle workers, while other texts are still being written.

`TrainingStep.run` is the algorithm. `Trainer` repeats it, and records, evaluates and saves between
steps. The engines and learners run on a group of workers, one in this process or several in others,
which also train the drafter while they would be idle. A step is complete when its weights are
published. A checkpoint is the state between two steps, so an interruption costs one step at most,
and a resumed run continues exactly like an uninterrupted one.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

from longtail.assembly.drafters import check_names
from longtail.assembly.precision import decided
from longtail.assembly.prompts import load_prompts
from longtail.assembly.trainer import TrainerComponents, assemble
from longtail.cluster.records import Progress, RolloutResult
from longtail.cluster.workers.states import Timeline
from longtail.config import files as configfile
from longtail.config.losses import LOSSES
from longtail.config.rl import RunConfig
from longtail.errors import CheckpointError, NonFiniteError
from longtail.rl.advantage import keep_informative, refill_size
from longtail.rl.data.requests import RequestBatch, requests_of
from longtail.rl.grading.pool import Graded, GraderPool
from longtail.rl.group_stream import GroupStream, samples_dynamically, step_batches
from longtail.run import summary
from longtail.run.base_model import find_base
from longtail.run.checkpoint import Checkpoint, RunDirectory
from longtail.run.console import Console
from longtail.run.evaluation import Evaluator, some_graded
from longtail.run.log_files import RunLogger
from longtail.run.state import StateSaver, TrainerState
from longtail.run.step_metrics import SampleRound, StepRecord
from longtail.system.device import set_threads, threads_each
from longtail.system.interrupt import Interrupted, Interruption
from longtail.system.stopwatch import Stopwatch
from longtail.types import Group
from longtail.view.report import write_report


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStep:
    """The algorithm: one on-policy step from prompts to published weights."""

    config: RunConfig
    components: TrainerComponents
    grader: GraderPool
    phase: Callable[..., AbstractContextManager[None]] = lambda *_, **__: nullcontext()
    """Shows what is being done, as `Console.phase`."""
    watch: Stopwatch = field(default_factory=Stopwatch)

    def run(self, step: int) -> StepRecord:
        """Make one training step and return its records."""
        self.watch.lap()
        rounds: list[SampleRound] = []
        while num_prompts := self._num_missing(rounds):
            requests = self._requests(num_prompts)
            wanted = self.config.rollout.prompts_per_step - len(self._learnable(rounds))
            stream = GroupStream(requests, self.grader, self.config.learner, num_wanted=wanted)
            rollout = self._rollout(step, len(rounds), requests, stream)
            graded = self._grade(stream, is_first=not rounds)
            rounds.append(SampleRound(num_prompts=num_prompts, rollout=rollout, graded=graded))
        groups = self._learnable(rounds)
        with self.watch.section("learn"), self.phase("learning"):
            learned = self.components.workers.learn(
                step_batches(groups, self.config.learner, self.components.sampling)
            )
        self._publish()
        return StepRecord(
            rounds=rounds, num_learned=len(groups), learned=learned, seconds=self.watch.lap()
        )

    def _num_missing(self, rounds: Sequence[SampleRound]) -> int:
        """Return the number of prompts to sample next; 0 if the batch is complete."""
        wanted, learner = self.config.rollout.prompts_per_step, self.config.learner
        if not rounds:
            return wanted
        if not samples_dynamically(learner) or len(rounds) > learner.max_refills:
            return 0
        return refill_size(
            wanted=wanted,
            informative=len(self._learnable(rounds)),
            sampled=sum(each.num_prompts for each in rounds),
        )

    def _learnable(self, rounds: Sequence[SampleRound]) -> list[Group]:
        """Return the groups to learn from, in the order of the prompts."""
        groups = [group for each in rounds for group in each.groups]
        if not samples_dynamically(self.config.learner):
            return groups
        return keep_informative(groups)[: self.config.rollout.prompts_per_step]

    def _requests(self, num_prompts: int) -> RequestBatch:
        """Return `group_size` requests for each of the next prompts."""
        return requests_of(
            self.components.source.take(num_prompts),
            samples=self.config.rollout.group_size,
            seed=self.config.run.seed,
            sampling=self.components.sampling,
            with_rows=self.config.environment.is_on,
        )

    def _rollout(
        self, step: int, refill: int, requests: RequestBatch, stream: GroupStream
    ) -> RolloutResult:
        """Generate the completions; idle workers train the drafter on them, or one does later."""
        name, total = "refill" if refill else "rollout", len(requests.requests)
        try:
            with self.watch.section("rollout"), self.phase(name, total=total):
                rollout = self.components.workers.rollout(step, requests.requests, stream)
            stream.add(rollout.completions)
        except BaseException:
            stream.close()
            raise
        with self.watch.section("drafter"), self.phase("training the drafter"):
            self.components.workers.train_drafter()
        return rollout

    def _grade(self, stream: GroupStream, *, is_first: bool) -> Graded:
        """Wait for the rewards; of the first round, one completion at least has one."""
        with self.watch.section("reward"), self.phase("grading"):
            graded = stream.finish()
        return some_graded(graded, self.config.reward.name) if is_first else graded

    def _publish(self) -> None:
        """Copy the learners' weights to the engines, and offer the newly trained drafter."""
        with self.watch.section("publish"), self.phase("publishing"):
            self.components.workers.publish()
        with self.watch.section("drafter"):
            self.components.workers.offer_drafter()


def train(config: RunConfig) -> int:
    """Run `longtail train` and return its exit code, which is 130 after an interruption."""
    check_names(config.speculation.drafter)
    console, config = Console(), decided(config)
    with RunDirectory(Path(config.run.dir), keep=config.run.keep_checkpoints) as run:
        checkpoint = run.start(configfile.render(config), resume=config.run.resume)
        if finished := summary.finished_summary(run.path, checkpoint, config.run.steps):
            console.log(
                f"{run.path}: its {finished['steps']} steps are done; raise run.steps to continue"
            )
            console.summary(finished, run.path)
            return 0
        with GraderPool(config.reward) as grader:
            return Trainer(config, run, checkpoint, grader, console).run()


class Trainer:
    """A run from its start, or its newest checkpoint, to its end or interruption."""

    def __init__(
        self,
        config: RunConfig,
        run: RunDirectory,
        checkpoint: Checkpoint | None,
        grader: GraderPool,
        console: Console,
    ) -> None:
        self._began = time.perf_counter()
        self._config, self._run, self._console = config, run, console
        self._interruption = Interruption()
        self.timeline: Timeline | None = None
        """States of the workers in the last step."""
        threads = set_threads(threads_each(config.run.threads, config.cluster.workers))
        with console.phase("fetching the model"):
            saved = None if checkpoint is None else checkpoint.state["base"]
            directory, base = find_base(config, saved, console.log)
        with console.phase("loading the model and the data"):
            log, now = console.log, run.begun
            prompts = partial(load_prompts, config, check=grader.check, log=log, now=now)
            parts = assemble(config, directory, base, prompts, log, self._on_progress, now)
        self.workers, self._source, self._limit = parts.workers, parts.source, parts.limit
        self._step = TrainingStep(
            config=config, components=parts, grader=grader, phase=console.phase
        )
        self._evaluator = Evaluator(
            config=config,
            workers=parts.workers,
            heldout=parts.heldout,
            sampling=parts.sampling,
            grader=grader,
            console=console,
        )
        last_step = None if checkpoint is None else checkpoint.step
        try:
            own = config.run
            self._saver = StateSaver(run, parts.workers, parts.source, keep=own.keep_checkpoints)
            cursor = parts.source.state()
            fresh = TrainerState(step=0, cursor=cursor, seconds=0.0, threads=threads, base=base)
            self._state = self._restored(checkpoint, fresh)
            with console.phase("starting the graders"):
                grader.wait_ready()
            shown = config.model_dump()
            self._logger = RunLogger(own, run.path, last_step=last_step, shown=shown)
            self._saver.begin_writing()
        except BaseException:
            self.workers.close()
            raise
        console.log(self._title(threads, last_step))

    def _title(self, threads: int, last_step: int | None) -> str:
        """Return what is trained, by how many workers, and where."""
        config = self._config
        resumed = "" if last_step is None else f", resumed after step {last_step}"
        return (
            f"{config.model.path}: {self._step.components.num_parameters:,} parameters, "
            f"{config.learner.loss}, {config.cluster.workers} x {threads} threads, run directory "
            f"{self._run.path}{resumed}"
        )

    def _restored(self, checkpoint: Checkpoint | None, fresh: TrainerState) -> TrainerState:
        """Restore a checkpoint, if there is one, and say whether threads differ from then."""
        state = self._saver.begin(checkpoint, fresh)
        if state.threads != fresh.threads:
            self._console.log(
                f"a worker had {state.threads} threads before and has {fresh.threads} now: "
                "updates round otherwise from here on (run.threads)"
            )
        return replace(state, threads=fresh.threads)

    def run(self) -> int:
        """Make all remaining steps, evaluate, and print the summary; return the exit code."""
        steps, every = self._config.run.steps, self._config.run.checkpoint_every
        try:
            with self._interruption:
                self.begin()
                while self._state.step < steps:
                    self.advance()
                    if self._state.step % every == 0 or self._state.step == steps:
                        self._checkpoint()
                self._finish()
                return 0
        except Interrupted:
            self.workers.abandon()
            self._checkpoint()
            self._console.log(_farewell(self._state.step))
            return 130
        except NonFiniteError as error:
            step = f"{self._state.step + 1} of {self._config.run.steps}"
            what = str(error).removeprefix(f"step {self._state.step}: ")
            loss, source = self._config.learner.loss, self._saver.newest_policy()
            mine = "" if loss in LOSSES else f"correct learner.loss = {loss!r}, or "
            raise NonFiniteError(
                f"stopped in step {step}: {what}; checkpoints stay; {mine}begin another run.dir "
                f"with model.path = {str(source or self._config.model.path)!r} and a lower "
                "learner.learning_rate"
            ) from error
        finally:
            self.close()

    def begin(self) -> None:
        """Publish the policy to all engines."""
        with self._console.phase("publishing"):
            self.workers.publish()

    def close(self) -> None:
        """Write pending files and end the workers."""
        self._logger.close()
        self.workers.close()

    def advance(self) -> dict[str, float]:
        """Evaluate if it is time, then `make_step`."""
        done, every = self._state.step, self._config.eval.every
        return self.make_step(
            self._evaluate() if done == 0 or (every > 0 and done % every == 0) else {}
        )

    def make_step(self, evaluated: Mapping[str, float] = MappingProxyType({})) -> dict[str, float]:
        """Make one training step, record it beside an evaluation, and return its metrics."""
        step = self._state.step + 1
        self._logger.log_workers(step, self.workers.drain_timeline(), ())
        with self._console.phase("step", f"{step}/{self._config.run.steps}"):
            record = self._step.run(step)
        self.timeline = self.workers.drain_timeline()
        metrics = {
            **record.metrics(),
            **self.timeline.metrics(),
            **self.workers.drafter_metrics(),
        }
        self._logger.write(step, {**evaluated, **metrics}, record)
        self._logger.log_workers(step, self.timeline, self.workers.drain_decisions())
        self._console.step(step, self._config.run.steps, metrics)
        learner = self._config.learner
        refills = learner.max_refills if samples_dynamically(learner) else 0
        shortage = record.shortage(self._config.rollout.prompts_per_step, refills)
        for line in shortage:
            self._console.log(line)
        self._state = replace(self._state, step=step, cursor=self._source.state())
        return metrics

    def _on_progress(self, progress: Progress) -> None:
        """Show the progress of a rollout. Raises Interrupted if the user stopped the run."""
        self._console.rollout_progress(progress)
        self._interruption.check()

    def _evaluate(self) -> dict[str, float]:
        """Return the metrics of a held-out evaluation of the present policy."""
        metrics, lines = self._evaluator.evaluate(self._state.step)
        self._logger.log(self._state.step + 1, lines)
        return metrics

    def _checkpoint(self) -> None:
        with self._console.phase("writing a checkpoint"):
            self._saver.save(replace(self._state, seconds=self._seconds()))

    def _seconds(self) -> float:
        """Return the wall time of the whole run, with the time before a resume."""
        return self._state.seconds + time.perf_counter() - self._began

    def _finish(self) -> None:
        """Evaluate the final policy, write summary and report, and print the summary."""
        path, limit = self._run.path, self._limit()
        finished = summary.summarize_run(
            summary.read_metrics(path / "metrics.jsonl"),
            steps=self._state.step,
            reward_after=self._evaluate().get("eval/reward_mean"),
            seconds=self._seconds(),
            limit="" if limit is None else limit.sentence(self._config.running),
        )
        summary.write_summary(path, finished)
        try:
            write_report(path)
        except (CheckpointError, LookupError, TypeError, ValueError) as error:
            # of a log that was edited; the run is complete without it
            self._console.log(f"no report: {error!r}")
        self._console.summary(finished, path)


def _farewell(step: int) -> str:
    if step == 0:
        return "stopped before the first step was complete; the same command starts again"
    return f"stopped after step {step}; the same command continues from there"
