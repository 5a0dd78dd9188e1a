"""Feed of the tokens that a step computed: to drafters, statistics and the feature store.

    step --add--> queue   --send--> drafters        before their next proposals
                  written --------> statistics      some steps at once
                  store                             each step

Switching between drafting and plain decoding changes no KV and recomputes nothing: drafters observe
what they have missed.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import final

from jaxtyping import Float
from torch import Tensor

from longtail.engine.batch import Scheduled
from longtail.engine.request import ActiveRequest
from longtail.engine.speculation.feature_store import FeatureStore
from longtail.engine.speculation.token_queue import Computed, ObservationQueue
from longtail.speculation.drafter import NO_TAPS, Drafter, Statistics
from longtail.speculation.tree import Accepted

_STEPS_READ = 8
"""Steps that statistics read at once, since each call has its cost."""


@final
class Observations:
    """Tokens that the readers have not read yet. Some readers may be missing."""

    def __init__(
        self,
        drafters: Sequence[Drafter],
        statistics: Statistics | None,
        store: FeatureStore | None,
    ) -> None:
        self._drafters, self._statistics, self._store = drafters, statistics, store
        self.taps = NO_TAPS
        """The features that all readers need together."""
        for reader in (*drafters, statistics, store):
            self.taps = self.taps if reader is None else self.taps.union(reader.taps)
        lookbacks = [drafter.lookback for drafter in drafters]
        self._queue = ObservationQueue(max(lookbacks, default=1) if all(lookbacks) else 0)
        self._written = ObservationQueue(max_bytes=sys.maxsize)
        self._finished: list[str] = []
        """Finished requests that drafters without taps still remember."""

    @property
    def num_waiting(self) -> int:
        """Number of steps that the drafters have not observed."""
        return len(self._queue)

    def add(
        self,
        scheduled: Sequence[Scheduled],
        accepted: Mapping[str, Accepted],
        features: Float[Tensor, "tokens features"] | None,
    ) -> None:
        """Add a step whose new tokens the requests hold; `features` are of its flat tokens."""
        ends = [each.active.num_computed for each in scheduled]
        step = partial(Computed, scheduled, ends, accepted)
        self._queue.add(step(features))
        if self._store is not None:
            self._store.add(step(self.taps.pick(self._store.taps, features)))
        if self._statistics is not None:
            self._written.add(step(self.taps.pick(self._statistics.taps, features)))
            if len(self._written) == _STEPS_READ:
                self._read_written()

    def send(self) -> None:
        """Pass all waiting tokens to the drafters."""
        text_only = not all(drafter.taps.any for drafter in self._drafters)
        for batch in self._queue.take(with_done=text_only):
            for drafter in self._drafters if batch.seen else ():
                drafter.observe(batch.seen, self.taps.pick(drafter.taps, batch.features))
                for request_id in batch.done:
                    drafter.forget(request_id)
        self._forget_finished()

    def forget(self, active: ActiveRequest) -> None:
        """Forget a finished request; drafters without taps observe its last tokens first."""
        for drafter in self._drafters:
            if drafter.taps.any:
                drafter.forget(active.request_id)
            else:
                self._finished.append(active.request_id)

    def end(self, *, is_drafting: bool) -> None:
        """Leave nothing pending, since no request is in progress.

        Drafters observe the last tokens only while they draft.
        """
        if is_drafting:
            self.send()
        self._queue.clear()
        self._read_written()
        self._forget_finished()

    def detach(self, successors: Sequence[Drafter], unfinished: Iterable[str]) -> None:
        """Pass all waiting tokens; remove the requests from drafters without successor."""
        self.send()
        self._read_written()
        for drafter in self._drafters:
            if not any(drafter is each for each in successors):
                for request_id in unfinished:
                    drafter.forget(request_id)

    def refresh(self) -> None:
        """Follow changed weights of the target; no request is in progress."""
        for drafter in self._drafters:
            drafter.refresh()
        if self._store is not None:
            self._store.clear()

    def _read_written(self) -> None:
        for batch in self._written.take(with_done=True):
            assert self._statistics is not None, "see `add`"
            assert batch.features is not None, "they are tapped"
            self._statistics.observe(batch.seen, batch.features)

    def _forget_finished(self) -> None:
        for drafter in self._drafters:
            if not drafter.taps.any:
                for request_id in self._finished:
                    drafter.forget(request_id)
        self._finished.clear()
