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
from typing import Any, Literal, final

from torch import Tensor

from longtail.device import compute_threads
from longtail.drafter.buffer import DrafterBuffer, Written
from longtail.drafter.eagle_drafter import EagleDrafter
from longtail.drafter.spot import Replica, SpotReport, SpotTrainer
from longtail.drafter.weights import DrafterWeights, are_finite
from longtail.engine.engine import RolloutEngine
from longtail.engine.report import RolloutMeter, RolloutReport, StepReport
from longtail.errors import ClusterError, NonFiniteError
from longtail.model import hf
from longtail.model.transformer import Transformer
from longtail.rl.examples import Example
from longtail.rl.learner import Learner, LearnerState
from longtail.rl.tally import LearnerReport
from longtail.rl.team import Alone, TorchTeam
from longtail.rollout_log import RolloutLog, RolloutSeries
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
class Machines:
    """What a worker drives. None of them knows another."""

    engine: RolloutEngine
    learner: Learner
    policy: Transformer
    """The learner's weights, for saving."""
    tokenizer: hf.Tokenizer
    drafting: Drafting | None
    """None where nothing is drafted by a drafter that can be trained."""
    rollout_threads: int
    drafter_s: float
    """Seconds that opening the drafter took: the embedded one may have been taught."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a worker's task is; counts are of the present rollout.

    Example: Progress(beats=812, num_finished=30, num_generated=9120, num_running=34, drafts=True)
    """

    beats: int = 0
    """Engine steps and training steps since the worker began: while it works, they rise."""
    num_finished: int = 0
    num_generated: int = 0
    num_running: int = 0
    drafts: bool | None = None
    """Whether the last step drafted; None if the engine never does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What came of a worker's share of a rollout."""

    completions: tuple[Completion, ...]
    report: RolloutReport
    series: RolloutSeries | None
    costs: Mapping[str, Any] | None
    """What steps cost, as JSON holds it."""
    known_costs: Mapping[str, Any] | None
    """What they were thought to cost before the worker's first rollout; None of later ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Drafter weights on their way to those who draft, and texts to see how they do.

    Example: Offer(weights=weights, digest=weights.digest, texts=texts)
    """

    weights: DrafterWeights
    digest: str
    texts: tuple[Example, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of drafter weights that were offered.

    Example: Verdict(version=4, is_adopted=True, before=2.31, after=2.52)
    """

    version: int
    is_adopted: bool
    before: float
    """Expected accept length of what was served; nan where there was no text to tell."""
    after: float
    reason: str = ""
    """Why not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyState:
    """The policy in the middle of a run: its weights and what its next update depends on."""

    weights: Mapping[str, Tensor]
    learner: LearnerState


@final
class Worker:
    """Owns its machines. Tasks are called by one thread, messages by any other."""

    def __init__(self, machines: Machines) -> None:
        self._machines = machines
        self._served = None if machines.drafting is None else machines.drafting.served
        self._stop = Event()
        self._lock = Lock()
        self._offers: list[Offer] = []
        self._fed: list[Written] = []
        self._verdicts: list[Verdict] = []
        self._candidate: Replica | None = None
        self._finished: list[Completion] = []
        self._shard: Mapping[str, Request] = {}
        self._progress = Progress()
        self._beats = 0
        self._has_served = False
        self.on_step: Callable[[Progress], None] | None = None
        """For who shares the worker's process: called after every engine step; may raise."""

    # ---- tasks

    def ready(self) -> float:
        """Return the seconds that opening the drafter took."""
        return self._machines.drafter_s

    def generate(self, requests: Sequence[Request]) -> Served:
        """Serve the requests to the end. Raises Stopped; then they are aborted."""
        engine, meter, log = self._machines.engine, RolloutMeter(), RolloutLog()
        known = None if engine.costs is None or self._has_served else engine.costs.numbers()
        self._has_served = True
        self._shard = {request.request_id: request for request in requests}
        self._finished = []
        self._progress = Progress(beats=self._beats)

        def note(step: StepReport) -> None:
            meter.add(step)
            log.add(step)
            self._note(step)
            self._take_offers()

        with compute_threads(self._machines.rollout_threads):
            self._take_offers()
            completions = engine.generate(requests, note)
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
        return self._machines.learner.step(batches)

    def publish(self) -> int:
        """Hand the learner's weights to the engine; return their version.

        Raises NonFiniteError naming the tensor if an update broke them, so that nothing is written
        with it or saved of it.
        """
        weights = self._machines.learner.weights()
        for name, tensor in weights.tensors.items():
            if not tensor.isfinite().all():
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
        drafting, weights = self._drafting(), offer.weights
        before = after = math.nan
        reason = ""
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
            drafting.drafter.adopt(weights.tensors)
            self._machines.engine.look_again()
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

    def join(self, rank: int, size: int, address: str, timeout_s: float) -> None:
        """Learn together with others from now on; alone if `size` is 1."""
        device = self._machines.policy.device
        backend: Literal["nccl", "gloo"] = "nccl" if device.type == "cuda" else "gloo"
        self._machines.learner.join(
            Alone()
            if size == 1
            else TorchTeam(rank, size, address, backend=backend, timeout_s=timeout_s)
        )

    def policy_state(self) -> PolicyState:
        """Copy the policy; while nobody learns, a message as well as a task."""
        learner = self._machines.learner
        return PolicyState(weights=learner.weights().tensors, learner=learner.state())

    def restore(self, state: PolicyState) -> None:
        """Go on from a policy; the weights that the worker was built with stay the KL reference."""
        self._machines.learner.restore(state.learner, state.weights)

    def restore_saved(self, directory: Path, learner: LearnerState) -> None:
        """Go on from weights on disk. Raises CheckpointError if they are of another model."""
        saved = hf.load_model(directory, self._machines.policy.dtype)
        self._machines.learner.restore(learner, dict(saved.named_parameters()))

    def save_policy(self, path: Path) -> None:
        """Write weights, generation config and tokenizer as a Hugging Face directory."""
        tokenizer = self._machines.tokenizer
        hf.save_model(self._machines.policy, path, eos_ids=tokenizer.eos_ids)
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

    def written(self, step: int, first: int = 0) -> list[Written]:
        """Copy the texts of the present rollout: finished ones from `first` on, and all others."""
        shard = self._shard
        texts = [
            Written(
                request_id=each.request_id,
                tokens=(*shard[each.request_id].prompt_tokens, *each.tokens),
                prompt_len=len(shard[each.request_id].prompt_tokens),
                step=step,
                is_finished=True,
            )
            for each in list(self._finished)[first:]
        ]
        for request_id, tokens, prompt_len in self._machines.engine.unfinished():
            texts.append(
                Written(
                    request_id=request_id,
                    tokens=tokens,
                    prompt_len=prompt_len,
                    step=step,
                    is_finished=False,
                )
            )
        return texts

    def feed(self, texts: Sequence[Written]) -> None:
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
        self._finished.extend(step.finished)
        before = self._progress
        self._progress = Progress(
            beats=self._beats,
            num_finished=len(self._finished),
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
            self.adopt(offers[-1])

    def _take_fed(self) -> None:
        if self._fed:
            with self._lock:
                fed, self._fed = self._fed, []
            self._drafting().buffer.add(fed)

    def _drafting(self) -> Drafting:
        if self._machines.drafting is None:
            raise ClusterError("this worker has no drafter that can be trained")
        return self._machines.drafting
