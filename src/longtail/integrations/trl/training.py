"""The drafter's training in a trainer's job: while this process waits, or for a share of its time.

    several processes   after its share of a rollout a process trains until the last one is done,
                        by a counter in the job's store; a stop takes one micro-batch
    one process         after each rollout, a tenth of its time, if that gains more
    tools               a process cannot know its last turn, so it trains like one alone

At the begin of the next rollout the processes exchange what they trained, all at once: the first
one merges the replicas and publishes the result, and all draft with it.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from longtail.cluster.work.publisher import DrafterState, Publisher
from longtail.cluster.workers.components import Drafting
from longtail.drafter.training.buffer import TextSnapshot
from longtail.drafter.training.replica import Replica
from longtail.drafter.training.spot import SpotTrainer
from longtail.drafter.weights import DrafterWeights
from longtail.integrations.mirror import MirroredPolicy
from longtail.integrations.trl.host import Ranks
from longtail.speculation.drafter import Statistics
from longtail.system.device import compute_threads
from longtail.types import Completion, Request

MAX_WAIT_S = 600.0
"""Most seconds of training while this process waits: the trainer has to find a lost process."""
_POLL_S = 0.005
_COUNTS = ("base_version", "num_tokens")
_MEASURED = ("seconds", "accept_len", "base_accept_len")


@final
class DrafterTraining:
    """Trains the drafter of one process, and exchanges it with those of the others."""

    def __init__(
        self, drafting: Drafting, ranks: Ranks, policy: MirroredPolicy, eos_ids: Sequence[int]
    ) -> None:
        self._drafting, self._ranks, self._policy = drafting, ranks, policy
        self.publisher = Publisher(drafting.served, drafting.buffer, drafting.sums)
        self._eos_ids = eos_ids
        self._replica: Replica | None = None
        self._num_rollouts = self._num_done = 0

    def begin(self) -> None:
        """Begin a rollout: exchange what was trained since the last one began."""
        if self._num_rollouts:
            self._exchange()
        self.publisher.begin_rollout()
        self._num_rollouts += 1
        self._drafting.buffer.begin(self._num_rollouts)

    def add(self, requests: Sequence[Request], completions: Sequence[Completion]) -> None:
        """Add finished texts of this rollout."""
        self._drafting.buffer.add(
            TextSnapshot.of(request, completion, self._num_rollouts)
            for request, completion in zip(requests, completions, strict=True)
        )

    def listen(self, is_on: bool) -> None:
        """Set whether the drafter learns from what is generated next."""
        if self._drafting.texts is not None:
            self._drafting.texts.is_on = is_on

    def train(self, gen_s: float, *, waits: bool) -> None:
        """Train after this process's share of a rollout, which took `gen_s`; each must call it.

        `waits`: until all processes are done with their share.
        """
        self._num_done += 1
        self._ranks.add("done", 1.0)
        began = time.perf_counter()
        limit_s = MAX_WAIT_S if waits else self.publisher.gain.share_s(gen_s)

        def is_over() -> bool:
            all_done = waits and self._ranks.total("done") >= self._num_done * self._ranks.size
            return all_done or time.perf_counter() - began >= limit_s

        if self._drafting.trainer is not None and not is_over():
            self._train(self._drafting.trainer, is_over)
        while waits and not is_over():
            time.sleep(_POLL_S)
        if waits:
            self._ranks.add("wait_s", time.perf_counter() - began)
        elif self._ranks.size == 1:
            self._exchange()

    def _train(self, trainer: SpotTrainer, should_stop: Callable[[], bool]) -> None:
        """Train by gradient."""
        trainer.begin(self.publisher.published)
        with torch.enable_grad():
            report = trainer.train(self._drafting.buffer, should_stop, lambda replica: None)
        self._replica = report.replica
        if report.replica is not None:
            self.publisher.gain.record(self._ranks.rank, report.replica)
        self._ranks.add("trained_tokens", report.num_tokens)
        self._ranks.add("train_s", report.seconds)

    # ---- exchange

    def _exchange(self) -> None:
        """Publish what the processes learned; each must call it."""
        before = self.publisher.published
        if self._drafting.texts is None:
            self._exchange_replicas()
        else:
            self._exchange_sums(self._drafting.texts)
        if self.publisher.published is not before:
            self._policy.load_drafter(self.publisher.published.tensors)

    def _exchange_sums(self, texts: Statistics) -> None:
        """Add up the sums of all processes; each solves them, on one thread, to equal bits."""
        own, publisher = texts.take(), self.publisher
        ranks = range(self._ranks.size)
        num_new = publisher.add_sums(
            own.restored(self._ranks.broadcast(own.tensors(), rank)) for rank in ranks
        )
        if num_new and publisher.sums is not None:
            with compute_threads(1):
                tensors = publisher.sums.weights(self._eos_ids)
            publisher.record(publisher.offer_solved(tensors, num_new).version)

    def _exchange_replicas(self) -> None:
        """Publish what the first process makes of the replicas of all."""
        own, publisher, before = self._replica, self.publisher, self.publisher.published
        trained = before.tensors if own is None else own.weights
        rows = self._ranks.all_gather(_as_row(own))
        replicas = [
            _of_row(row, self._ranks.broadcast(trained, rank))
            for rank, row in enumerate(rows)
            if row[0]
        ]
        self._replica = None
        if self._ranks.rank == 0:  # its texts renew the ids of all
            offer = publisher.offer(replicas, is_last=True)
            publisher.record(None if offer is None else offer.version)
        served, known = publisher.published, publisher.accept_len
        row = [served.version, served.num_tokens, math.nan if known is None else known]
        version, num_tokens, measured = self._ranks.all_gather(row)[0]
        if version != before.version:
            tensors = self._ranks.broadcast(served.tensors, 0)
            weights = DrafterWeights(
                version=int(version), tensors=tensors, num_tokens=int(num_tokens)
            )
            publisher.publish(weights, None if math.isnan(measured) else measured)

    # ---- state

    def state(self) -> DrafterState:
        """Copy the served drafter, its texts and counters."""
        return self.publisher.state(rollouts=self._num_rollouts)

    def restore(self, state: DrafterState) -> None:
        """Continue from a saved state. Raises CheckpointError if it is of another drafter."""
        weights = self.publisher.restore(state)
        self._num_rollouts = state.numbers["rollouts"]
        self._policy.load_drafter(weights.tensors)


def _as_row(replica: Replica | None) -> list[float]:
    names = (*_COUNTS, *_MEASURED)
    if replica is None:
        return [0.0] * (1 + len(names))
    return [1.0, *(float(getattr(replica, name)) for name in names)]


def _of_row(row: Sequence[float], weights: Mapping[str, Tensor]) -> Replica:
    named: dict[str, Any] = dict(zip((*_COUNTS, *_MEASURED), row[1:], strict=True))
    return Replica(weights=weights, **named | {name: int(named[name]) for name in _COUNTS})
