"""The drafter's training in a trainer's job: while this process waits, or for a share of its time.

    several processes   after its share of a rollout a process trains until the last one is done,
                        by a counter in the job's store; a stop takes one micro-batch
    one process         after each rollout, a tenth of its time
    tools               a process cannot know its last turn, so it trains like one alone

At the begin of the next rollout the processes exchange what they trained, all at once: the first
one merges the replicas and publishes the result, and all draft with it.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor

from longtail.cluster.drafter.publisher import Publisher
from longtail.cluster.group import SHARE, DrafterState, with_new
from longtail.cluster.worker import Drafting
from longtail.drafter.formats.checkpoint import LoadedDrafter
from longtail.drafter.training.buffer import TextSnapshot
from longtail.drafter.training.replica import Replica
from longtail.drafter.weights import (
    DRAFT_IDS,
    DrafterWeights,
    load_parameters,
    with_prefix,
    without_prefix,
)
from longtail.errors import CheckpointError
from longtail.integrations.mirror import MirroredPolicy
from longtail.integrations.trl.host import Ranks
from longtail.speculation.drafter import Statistics
from longtail.system.device import compute_threads
from longtail.types import Completion, Request

MAX_WAIT_S = 600.0
"""Most seconds of training while this process waits: the trainer has to find a lost process."""
_POLL_S = 0.005
_DRAFTER, _BUFFER, _SUMS = "drafter/", "buffer/", "sums/"
_ROW = ("is_there", "base_version", "num_tokens", "num_steps", "accept_len", "base_accept_len")


@final
class DrafterTraining:
    """Trains the drafter of one process, and exchanges it with those of the others."""

    def __init__(
        self, drafting: Drafting, ranks: Ranks, policy: MirroredPolicy, eos_ids: Sequence[int]
    ) -> None:
        self._drafting, self._ranks, self._policy = drafting, ranks, policy
        self._publisher = Publisher(drafting.served, drafting.buffer)
        self._served = drafting.served
        self._eos_ids = eos_ids
        self._replica: Replica | None = None
        self._sums = drafting.sums
        """Sums over the texts of all processes up to the last exchange."""
        self._num_rollouts = self._num_done = 0

    @property
    def served(self) -> DrafterWeights:
        """The weights that this process drafts with."""
        return self._served

    @property
    def accept_len(self) -> float | None:
        """Expected accept length of the served drafter at its publication; None: unknown."""
        return self._publisher.accept_len

    def trained(self, drafter: LoadedDrafter) -> LoadedDrafter:
        """Return a drafter of the initial shape with the weights in use."""
        load_parameters(drafter.layer, self._served.tensors)
        ids = self._served.tensors.get(DRAFT_IDS, drafter.draft_ids)
        return replace(
            drafter,
            draft_ids=ids,
            training=replace(
                drafter.training, accept_len=self.accept_len, agreement=(), overlap=()
            ),
        )

    def begin(self) -> None:
        """Begin a rollout: exchange what was trained since the last one began."""
        if self._num_rollouts:
            self._exchange()
        self._publisher.begin_rollout()
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

    def end_share(self) -> None:
        """Count this process as done with its share of the rollout; each must call it."""
        self._num_done += 1
        self._ranks.add("done", 1.0)

    def train_waiting(self) -> float:
        """Train until all processes are done with their share; return the seconds of waiting."""
        began = time.perf_counter()

        def are_all_done() -> bool:
            return (
                self._ranks.total("done") >= self._num_done * self._ranks.size
                or time.perf_counter() - began > MAX_WAIT_S
            )

        if not are_all_done():
            self._train(are_all_done)
            while not are_all_done():
                time.sleep(_POLL_S)
        return time.perf_counter() - began

    def train_share(self, seconds: float) -> None:
        """Train for a share of the time of a rollout of `seconds`."""
        end = time.perf_counter() + SHARE * seconds
        self._train(lambda: time.perf_counter() > end)
        if self._ranks.size == 1:
            self._exchange()

    def _train(self, should_stop: Callable[[], bool]) -> None:
        """Train by gradient; a drafter that learns from sums has learned already."""
        trainer = self._drafting.trainer
        if trainer is None:
            return
        trainer.begin(self._served)
        with torch.enable_grad():
            report = trainer.train(self._drafting.buffer, should_stop, lambda replica: None)
        self._replica = report.replica
        self._ranks.add("trained_tokens", report.num_tokens)
        self._ranks.add("train_s", report.seconds)

    # ---- exchange

    def _exchange(self) -> None:
        """Publish what the processes learned; each must call it."""
        if self._drafting.texts is None:
            self._exchange_replicas()
        else:
            self._exchange_sums(self._drafting.texts)

    def _exchange_sums(self, texts: Statistics) -> None:
        """Add up the sums of all processes; each solves them, on one thread, to equal bits."""
        assert self._sums is not None, "texts are added to sums"
        own, ranks = texts.take(), range(self._ranks.size)
        new = (own.restored(self._ranks.broadcast(own.tensors(), rank)) for rank in ranks)
        known, num_new = with_new(self._sums, new)
        if num_new:
            self._sums = known
            with compute_threads(1):
                tensors = known.weights(self._eos_ids)
            version, num_tokens = self._served.version + 1, self._served.num_tokens + num_new
            weights = DrafterWeights(version=version, tensors=tensors, num_tokens=num_tokens)
            self._serve(weights, None)

    def _exchange_replicas(self) -> None:
        rows = self._ranks.all_gather(_as_row(self._replica))
        replicas = [
            _of_row(row, self._ranks.broadcast(self._own_weights(), rank))
            for rank, row in enumerate(rows)
            if row[0]
        ]
        self._replica = None
        # All decide alike from the same numbers; only the first process's texts renew the ids.
        offer = self._publisher.offer(replicas, renews=True) if self._ranks.rank == 0 else None
        header = [math.nan] * 3
        if offer is not None:
            measured = self._publisher.measured(offer.version)
            header = [float(offer.version), float(offer.num_tokens), measured]
        version, num_tokens, after = self._ranks.all_gather(header)[0]
        if math.isnan(version):
            return
        shapes = self._served.tensors if offer is None else offer.tensors
        tensors = self._ranks.broadcast(shapes, 0)
        weights = DrafterWeights(version=int(version), tensors=tensors, num_tokens=int(num_tokens))
        self._serve(weights, after if math.isfinite(after) else None)

    def _own_weights(self) -> Mapping[str, Tensor]:
        return self._served.tensors if self._replica is None else self._replica.weights

    def _serve(self, weights: DrafterWeights, accept_len: float | None) -> None:
        """Draft with published weights."""
        known = accept_len if accept_len is not None else self._publisher.accept_len
        self._publisher.restore(weights, known)
        self._policy.load_drafter(weights.tensors)
        self._served = weights

    # ---- state

    def state(self) -> DrafterState:
        """Copy the served drafter, its texts and counters."""
        buffer = self._drafting.buffer
        return DrafterState(
            tensors=with_prefix(_DRAFTER, self._served.tensors)
            | with_prefix(_BUFFER, buffer.tensors())
            | with_prefix(_SUMS, {} if self._sums is None else self._sums.tensors()),
            numbers={
                "version": self._served.version,
                "num_tokens": self._served.num_tokens,
                "accept_len": self.accept_len,
                "buffer": buffer.state(),
                "rollouts": self._num_rollouts,
            },
        )

    def restore(self, state: DrafterState) -> None:
        """Continue from a saved state. Raises CheckpointError if it is of another drafter."""
        tensors, numbers = state.drafter(), state.numbers
        if not self._served.is_shaped_as(tensors):
            raise CheckpointError("the drafter of the checkpoint is of another shape")
        self._drafting.buffer.restore(without_prefix(_BUFFER, state.tensors), numbers["buffer"])
        if self._sums is not None:
            self._sums = self._sums.restored(state.sums())
        self._num_rollouts = numbers["rollouts"]
        weights = DrafterWeights(
            version=numbers["version"], tensors=tensors, num_tokens=numbers.get("num_tokens", 0)
        )
        self._serve(weights, numbers["accept_len"])


def _as_row(replica: Replica | None) -> list[float]:
    if replica is None:
        return [0.0] * len(_ROW)
    return [1.0, *(float(getattr(replica, name)) for name in _ROW[1:])]


def _of_row(row: Sequence[float], weights: Mapping[str, Tensor]) -> Replica:
    named: dict[str, Any] = dict(zip(_ROW[1:], row[1:], strict=True))
    counts = {name: int(named.pop(name)) for name in ("base_version", "num_tokens", "num_steps")}
    return Replica(weights=weights, **counts, **named)
