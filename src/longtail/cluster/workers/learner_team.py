"""The team of learners: all workers make each step together, again if a worker dies in it.

A learner that loses its team in a step changes nothing. So either no member has made the step, or
those that have pass it on when the team is formed anew: the step is made exactly once.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from longtail.cluster.records import TaskResult
from longtail.cluster.workers.worker import Worker
from longtail.cluster.workers.worker_pool import WorkerPool
from longtail.config.rl import RunConfig
from longtail.errors import AGAIN, ClusterError, ProcessGroupError
from longtail.rl.learner import LearnerState
from longtail.rl.learner_metrics import LearnerReport
from longtail.types import TrainBatch

_ATTEMPTS = 4
"""Number of attempts at a task of the whole team, which fails with each member."""


@final
class LearnerTeam:
    """Forms the team of all learners, and forms it again when a member is lost."""

    def __init__(self, pool: WorkerPool, config: RunConfig, log: Callable[[str], None]) -> None:
        self._pool, self._log = pool, log
        self._timeout_s, self._is_sharded = config.cluster.worker_timeout_s, config.is_sharded
        self._members: list[int] = []
        """Workers of the team, by rank."""
        self.is_stale = True
        """Whether the team must be formed again: a member was replaced, or has failed."""

    def learn(self, batches: Sequence[TrainBatch]) -> LearnerReport:
        """Make one learner step. Raises ClusterError if every attempt fails."""
        for _ in range(_ATTEMPTS):
            self.form()
            found = self._pool.run(Worker.learn, dict.fromkeys(self._members, (batches,)))
            _raise_own_errors(found)
            done = [worker for worker, ended in found.items() if ended.error is None]
            if len(done) < len(self._members):
                self.is_stale = True
            if done:
                report = found[done[0]].value()  # the same for all
                self.form(report.version)
                return report
        raise ClusterError(f"a learner step failed {_ATTEMPTS} times; {AGAIN}")

    def state(self) -> LearnerState:
        """Copy the state of the learner without the weights; of shards, all rows."""
        for _ in range(_ATTEMPTS):
            self.form()
            tensors: dict[str, Tensor] = {}
            for worker in self._members if self._is_sharded else (0,):
                (state,) = self._pool.run_on((worker,), Worker.learner_state)
                for name, rows in state.tensors.items():
                    if name not in tensors:
                        tensors[name] = rows
                    elif rows.dim() > 0:
                        tensors[name] = torch.cat((tensors[name], rows))
            if not self.is_stale:
                return LearnerState(tensors=tensors, numbers=state.numbers)
        raise ClusterError(f"the learner's state could not be copied in {_ATTEMPTS} attempts")

    def form(self, version: int | None = None) -> None:
        """Form the team anew if it is stale, or other workers are there.

        Its members then have the newest policy of them all. Raises ClusterError if that is not
        `version`, where it is given.
        """
        self._pool.wait_ready()
        for _ in range(_ATTEMPTS):
            present = self._pool.present
            if self._pool.size == 1 or (self._members == present and not self.is_stale):
                self._members, self.is_stale = present, False
                return
            try:
                address = self._pool.processes.rendezvous_address()
            except ClusterError as error:
                self._pool.mark_lost(0, str(error))
                self._pool.wait_ready()
                continue
            size = len(present)
            if present != self._members and (self._members or size < self._pool.size):
                self._log(f"{size} of {self._pool.size} workers take part from now on")
            self._members = present
            args = {
                worker: (rank, size, address, self._timeout_s)
                for rank, worker in enumerate(present)
            }
            found = self._pool.run(Worker.join, args)
            _raise_own_errors(found)
            self.is_stale = len(found) < size or any(end.error for end in found.values())
            joined = [ended.value() for ended in found.values() if ended.error is None]
            if version is not None and any(each != version for each in joined):
                raise ClusterError(f"all workers that had made the learner step are lost; {AGAIN}")
            self._pool.wait_ready()
        if self.is_stale or self._members != self._pool.present:
            raise ClusterError(
                f"the workers cannot find each other; see that they share a network, then {AGAIN}"
            )


def _raise_own_errors(found: Mapping[int, TaskResult[Any]]) -> None:
    """Raise an error that is no consequence of the loss of a member."""
    for ended in found.values():
        if not ended.is_lost and not isinstance(ended.error, ProcessGroupError):
            ended.value()
