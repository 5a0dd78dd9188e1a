"""The interface of work for workers that have nothing to generate.

A rollout waits for no such work. `learning_ahead` learns from finished groups, and
`drafter_publisher` trains the drafter.
"""

from collections.abc import Collection, Sequence
from typing import Any

from longtail.cluster.records import TaskResult
from longtail.types import Completion

POLL_S = 0.2
"""Seconds between two looks at the workers."""


class IdleWork:
    """One kind of work for idle workers in one rollout."""

    is_endless = True
    """Whether it goes on until it is ended."""

    def has_work(self, worker: int) -> bool:
        """Return whether there is something to do for an idle worker, or one that does this."""
        raise NotImplementedError

    def start(self, worker: int) -> None:
        """Start the work on an idle worker."""
        raise NotImplementedError

    def end(self, worker: int) -> None:
        """End endless work of a worker soon."""

    def add(self, completions: Sequence[Completion]) -> None:
        """Take completions as they are finished."""

    def on_ended(self, ended: TaskResult[Any]) -> None:
        """Record the end of a worker's task, or the loss of a worker that did it."""

    def on_lost(self, worker: int) -> None:
        """Forget what a lost worker had, whatever it did."""

    def poll(self, answering: Collection[int]) -> None:
        """Exchange what is new with the workers, of which only those in `answering` are asked."""
