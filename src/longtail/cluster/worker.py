"""A worker: an engine, a learner and a drafter trainer on one processor, one of them at a time.

    task        generate, learn, publish, spot, adopt, ...     one after the other, in one thread
    message     stop, offer, feed, written, progress           at any time, from another thread

A worker knows neither other workers nor who asks. What it is told by messages is taken up between
two engine steps or two micro-steps of training; what it tells is copied, so nobody waits.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock
from typing import Literal, NamedTuple, final

import torch

from longtail.cluster.probe import Probe, probe
from longtail.cluster.records import Offer, PolicyState, Progress, Served, Verdict
from longtail.drafter.eagle.drafter import EagleDrafter
from longtail.drafter.eagle.weights import DrafterWeights, are_finite
from longtail.drafter.formats.checkpoint import LoadedDrafter
from longtail.drafter.training.buffer import DrafterBuffer, TextSnapshot
from longtail.drafter.training.spot import Replica, SpotReport, SpotTrainer
from longtail.engine.engine import RolloutEngine
from longtail.engine.report import RolloutMeter, StepReport
from longtail.engine.rollout_log import RolloutLog
from longtail.errors import ClusterError, NonFiniteError
from longtail.model.hf.model import load_model, save_model
from longtail.model.hf.tokenizer import Tokenizer
from longtail.model.transformer import Transformer
from longtail.rl.collectives import TorchTeam
from longtail.rl.learner import Learner, LearnerState
from longtail.rl.learner_metrics import LearnerReport
from longtail.system.device import compute_threads
from longtail.types import Completion, Request, TrainBatch


class Stopped(Exception):  # noqa: N818 - not an error: somebody asked for it
    """The task was told to stop before it was done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """The drafter that a worker serves and trains."""

    drafter: EagleDrafter
    trainer: SpotTrainer
    served: DrafterWeights
    """What the drafter begins with."""
    buffer: DrafterBuffer


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerComponents:
    """What a worker drives. None of them knows another."""

    engine: RolloutEngine
    learner: Learner
    policy: Transformer
    """The learner's weights, for saving; in main memory if it is sharded."""
    device: torch.device
    """What all is computed on."""
    tokenizer: Tokenizer
    drafting: Drafting | None
    """None where nothing is drafted by a drafter that can be trained."""
    read_drafter: Callable[[], LoadedDrafter | None]
    rollout_threads: int
    drafter_s: float
    """Seconds that opening the drafter took: the embedded one may have been taught."""


class _Shard(NamedTuple):
    """What is being written; swapped as a whole, since another thread reads it."""

    requests: Mapping[str, Request]
    finished: list[Completion]


@final
class Worker:
    """Owns its machines. Tasks are called by one thread, messages by any other."""

    def __init__(self, machines: WorkerComponents) -> None:
        self._machines = machines
        self._served = None if machines.drafting is None else machines.drafting.served
        self._stop = Event()
        self._lock = Lock()
        self._offers: list[Offer] = []
        self._fed: list[TextSnapshot] = []
        self._verdicts: list[Verdict] = []
        self._candidate: Replica | None = None
        self._shard = _Shard({}, [])
        self._progress = Progress()
        self._beats = 0
        self._has_served = False
        self.on_step: Callable[[Progress], None] | None = None
        """For who shares the worker's process: called after every engine step; may raise."""

    # ---- tasks

    def probe_drafter(self, requests: Sequence[Request]) -> Probe | None:
        """Measure the drafter that was given on what the policy writes; None without an EAGLE."""
        own, given = self._machines, self._machines.read_drafter()
        with compute_threads(own.rollout_threads):
            return None if given is None else probe(given, own.engine, own.tokenizer, requests)

    def save_drafter(self, path: Path) -> None:
        """Write the drafter that was given, where it is an EAGLE."""
        if (given := self._machines.read_drafter()) is not None:
            given.save(path)

    def ready(self) -> float:
        """Return the seconds that opening the drafter took."""
        return self._machines.drafter_s

    def generate(self, requests: Sequence[Request]) -> Served:
        """Serve the requests to the end. Raises Stopped; then they are aborted."""
        engine, meter, log = self._machines.engine, RolloutMeter(), RolloutLog()
        known = None if engine.costs is None or self._has_served else engine.costs.numbers()
        self._has_served = True
        self._shard = _Shard({request.request_id: request for request in requests}, [])
        self._progress = Progress(beats=self._beats)

        def note(step: StepReport) -> None:
            meter.add(step)
            log.add(step)
            self._note(step)
            self._take_offers()

        try:
            with compute_threads(self._machines.rollout_threads):
                self._take_offers()
                completions = engine.generate(requests, note)
        finally:  # whoever asks later means another rollout
            self._shard = _Shard({}, [])
        costs = engine.costs
        return Served(
            completions=tuple(completions),
            report=meter.report(),
            series=log.series(),
            costs=None if costs is None else costs.numbers(),
            known_costs=known,
        )

    def learn(self, batches: Sequence[TrainBatch]) -> LearnerReport:
        """Make one learner step, together with the team if there is one."""

        def note(is_waiting: bool) -> None:
            self._beats += 1
            self._progress = Progress(beats=self._beats, is_waiting=is_waiting)

        self._machines.engine.sleep()
        try:
            return self._machines.learner.step(batches, note)
        finally:
            self._progress = Progress(beats=self._beats)

    def publish(self) -> int:
        """Hand the learner's weights to the engine; return their version.

        Raises NonFiniteError naming the tensor if an update broke them, so that nothing is written
        with it or saved of it.
        """
        weights = self._machines.learner.weights()
        for name, tensor in weights.tensors.items():
            if not are_finite({name: tensor}):
                raise NonFiniteError(f"{name} is not finite in policy version {weights.version}")
        self._machines.engine.pull(weights)
        return weights.version

    def spot(self, published: DrafterWeights, limit_s: float = math.inf) -> SpotReport:
        """Train the drafter until told to stop, for so long at most, or until it no longer pays."""
        drafting = self._drafting()
        self._take_fed()
        drafting.trainer.begin(published)
        self._candidate = None
        began = time.perf_counter()

        def stopped() -> bool:
            self._beats += 1
            self._progress = Progress(beats=self._beats)
            self._take_fed()
            return self._stop.is_set() or time.perf_counter() - began > limit_s

        def keep(replica: Replica) -> None:
            self._candidate = replica

        return drafting.trainer.train(drafting.buffer, stopped, keep)

    def adopt(self, offer: Offer) -> Verdict:
        """Draft with the offered weights, unless they are damaged or do worse on the texts."""
        drafting, weights, reason = self._drafting(), offer.weights, ""
        before = after = math.nan
        if weights.digest != offer.digest:
            reason = "they are not what was sent"
        elif not are_finite(weights.tensors):
            reason = "they are not finite"
        else:
            assert self._served is not None, "whoever drafts serves something"
            drafting.trainer.begin(self._served)
            before, after = drafting.trainer.probe(weights.tensors, offer.texts)
            reason = f"{after:.3f} on recent texts, {before:.3f} before" if after < before else ""
        if not reason:
            drafting.drafter.load_weights(weights.tensors)
            self._machines.engine.reset_estimates()
            self._served = weights
        verdict = Verdict(
            version=weights.version,
            is_adopted=not reason,
            before=before,
            after=after,
            reason=reason,
        )
        with self._lock:
            self._verdicts.append(verdict)
        return verdict

    def num_parameters(self) -> int:
        """Count the policy's parameters."""
        return sum(parameter.numel() for parameter in self._machines.policy.parameters())

    def drafter_weights(self) -> DrafterWeights | None:
        """Return the drafter that is served, None if there is none that can be trained."""
        return self._served

    def join(self, rank: int, size: int, address: str, timeout_s: float) -> int:
        """Learn together with others from now on; return the version, the newest of them all."""
        is_gpu = self._machines.device.type == "cuda"
        backend: Literal["nccl", "gloo"] = "nccl" if is_gpu else "gloo"
        team = TorchTeam(rank, size, address, backend=backend, timeout_s=timeout_s)
        return self._machines.learner.join(team)

    def policy_state(self) -> PolicyState:
        """Copy the policy; while nobody learns, a message as well as a task."""
        learner = self._machines.learner
        return PolicyState(weights=learner.weights().tensors, learner=learner.state())

    def learner_state(self) -> LearnerState:
        """Copy what the next step depends on beside the weights; sharded, this worker's rows."""
        return self._machines.learner.state()

    def restore(self, state: PolicyState) -> None:
        """Go on from a policy; the weights that the worker was built with stay the KL reference."""
        self._machines.learner.restore(state.learner, state.weights)

    def restore_saved(self, directory: Path, learner: LearnerState) -> None:
        """Go on from weights on disk. Raises CheckpointError if they are of another model."""
        saved = load_model(directory, self._machines.policy.dtype)
        self._machines.learner.restore(learner, dict(saved.named_parameters()))

    def save_policy(self, path: Path) -> None:
        """Write weights, generation config and tokenizer as a Hugging Face directory."""
        tokenizer = self._machines.tokenizer
        save_model(self._machines.policy, path, eos_ids=tokenizer.eos_ids)
        tokenizer.save(path)

    # ---- messages

    def stop(self) -> None:
        """Stop the present task within one step; it is told again what to do by `go`."""
        self._stop.set()

    def go(self) -> None:
        """Heed no earlier `stop`."""
        self._stop.clear()

    def progress(self) -> Progress:
        """Tell how far it is."""
        return self._progress

    def written(self, step: int, first: int = 0) -> list[TextSnapshot]:
        """Copy the texts of the present rollout: finished ones from `first` on, and all others."""
        shard = self._shard
        texts = [
            TextSnapshot.of(shard.requests[each.request_id], each, step)
            for each in list(shard.finished)[first:]
        ]
        texts += [
            TextSnapshot(
                request_id=name, tokens=tokens, prompt_len=prompt_len, step=step, is_finished=False
            )
            for name, tokens, prompt_len in self._machines.engine.unfinished()
        ]
        return texts

    def feed(self, texts: Sequence[TextSnapshot]) -> None:
        """Hand over texts to learn the drafter from."""
        with self._lock:
            self._fed.extend(texts)

    def offer(self, offer: Offer) -> None:
        """Offer drafter weights in mid-rollout: looked at between two engine steps."""
        with self._lock:
            self._offers.append(offer)

    def candidate(self) -> Replica | None:
        """Return the best drafter that the present spot training has measured."""
        return self._candidate

    def verdicts(self) -> list[Verdict]:
        """Hand out what became of offers since the last time."""
        with self._lock:
            found, self._verdicts = self._verdicts, []
        return found

    # ---- between two steps

    def _note(self, step: StepReport) -> None:
        self._beats += 1
        self._shard.finished.extend(step.finished)
        before = self._progress
        self._progress = Progress(
            beats=self._beats,
            num_finished=len(self._shard.finished),
            num_generated=before.num_generated + len(step.emitted),
            num_running=step.num_running,
            drafts=bool(step.verified) if step.readings else None,
        )
        if self.on_step is not None:
            self.on_step(self._progress)
        if self._stop.is_set():
            raise Stopped

    def _take_offers(self) -> None:
        if self._offers:
            with self._lock:
                offers, self._offers = self._offers, []
            newest = max(offers, key=lambda offer: offer.weights.version)
            # One that came as a rollout ended may be older than what was adopted since.
            if self._served is None or newest.weights.version > self._served.version:
                self.adopt(newest)

    def _take_fed(self) -> None:
        if self._fed:
            with self._lock:
                fed, self._fed = self._fed, []
            self._drafting().buffer.add(fed)

    def _drafting(self) -> Drafting:
        if self._machines.drafting is None:
            raise ClusterError("this worker has no drafter that can be trained")
        return self._machines.drafting
