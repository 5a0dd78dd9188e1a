"""The feature store: the target's features of generated sequences, for drafter training.

    step --pending--> spans --> a row for each token, by those before --find(tokens)--> rows

A feature depends on the weights and the tokens so far, and on nothing else. So the rows are the
nodes of a tree, a token below those before it: requests share the rows of a beginning, like its
KV, and a sequence of another worker is missing. All features are dropped when the weights change.

Workers that finish last rarely train, so storing must be nearly free: a step only appends to the
pending steps, with rejected nodes, until a sequence is requested or the pending steps are large.
"""

from collections.abc import Sequence
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from longtail.engine.request import ActiveRequest
from longtail.engine.speculation.token_queue import Computed
from longtail.speculation.drafter import Taps

_PENDING_PARTS = 4
"""Fraction 1/4 of the memory is for pending steps."""
_ROOT = -1


@final
class FeatureStore:
    """Features of the latest sequences, in at most `max_bytes`.

    The least recently extended request is dropped first, as a whole: finished before running ones.
    A recomputed request keeps its rows.
    """

    def __init__(self, taps: Taps, max_bytes: int) -> None:
        assert taps.any, "features need taps"
        self.taps = taps
        self._max_pending = max_bytes // _PENDING_PARTS
        self._max_kept = max_bytes - self._max_pending
        self._pending: list[Computed] = []
        self._num_pending = 0
        """Bytes of the pending steps."""
        self._rows: Tensor | None = None
        """Allocated with the shape and dtype of the first step; touched only where written."""
        self._free: list[int] = []
        self._row_of: dict[tuple[int, int], int] = {}
        """Row of a token by the row of the token before it."""
        self._num_users: list[int] = []
        """Number of requests that use each row."""
        self._sequences: dict[ActiveRequest, list[int]] = {}
        """Rows of each request from its first token on; in the order of their last extension."""

    @property
    def num_bytes(self) -> int:
        """Bytes of pending steps and of used rows."""
        if self._rows is None:
            return self._num_pending
        return self._num_pending + (len(self._rows) - len(self._free)) * _row_bytes(self._rows)

    def clear(self) -> None:
        """Drop everything, since the weights changed."""
        self._pending, self._num_pending = [], 0
        for active in list(self._sequences):
            self._drop(active)

    def add(self, step: Computed) -> None:
        """Append a step with features, which must not be changed afterwards."""
        assert step.features is not None, "steps of the store have features"
        self._pending.append(step)
        self._num_pending += len(step.features) * _row_bytes(step.features)
        if self._num_pending > self._max_pending:
            self._store_pending()

    def find(self, tokens: Sequence[int]) -> Float[Tensor, "tokens features"] | None:
        """Return the features of a sequence; None if some are missing.

        The last row is NaN: an engine never computes the last token of a sequence, and no training
        target depends on it.
        """
        if not self.has(tokens) or self._rows is None:
            return None
        kept = self._rows[torch.tensor(self._known(tokens[:-1]), device=self._rows.device)]
        return torch.cat((kept, kept.new_full((1, kept.shape[1]), float("nan"))))

    def has(self, tokens: Sequence[int]) -> bool:
        """Return whether `find` has the features of a sequence."""
        self._store_pending()
        return 0 < len(self._known(tokens[:-1])) == len(tokens) - 1

    def _known(self, tokens: Sequence[int]) -> list[int]:
        """Return the rows of the first tokens, up to one without a row."""
        rows: list[int] = []
        for token in tokens:
            row = self._row_of.get((rows[-1] if rows else _ROOT, token))
            if row is None:
                break
            rows.append(row)
        return rows

    def _store_pending(self) -> None:
        """Store the tokens of the pending steps in rows."""
        steps, self._pending, self._num_pending = self._pending, [], 0
        for step in steps:
            self._store(step)

    def _store(self, step: Computed) -> None:
        features, spans = step.features, list(step.spans())
        assert features is not None, "see `add`"
        if self._rows is None:
            size = self._max_kept // _row_bytes(features)
            self._rows = features.new_empty(size, features.shape[1])
            self._free, self._num_users = list(range(size)), [0] * size
        if not self._make_room(sum(len(each.rows) for each in spans)):
            return
        moves: list[tuple[int, int]] = []
        for each in spans:
            sequence = self._sequence_of(each.active, each.start)
            first = len(sequence) - each.start
            for source in each.rows[first:] if first >= 0 else ():
                key = (sequence[-1] if sequence else _ROOT, each.active.tokens[len(sequence)])
                if key not in self._row_of:
                    self._row_of[key] = self._free.pop()
                    moves.append((self._row_of[key], source))
                sequence.append(self._row_of[key])
                self._num_users[sequence[-1]] += 1
        if moves:  # one copy for all requests
            rows, sources = torch.tensor(moves, device=features.device).T
            self._rows[rows] = features[sources]

    def _make_room(self, count: int) -> bool:
        """Free at least `count` rows if possible; return whether they are free."""
        while len(self._free) < count and self._sequences:
            self._drop(next(iter(self._sequences)))
        return len(self._free) >= count

    def _sequence_of(self, active: ActiveRequest, start: int) -> list[int]:
        """Return the known rows of a request that is computed from `start` on, as the latest."""
        if len(self._sequences.get(active, ())) < start:  # new, or recomputed after shared KV
            self._drop(active)
            self._sequences[active] = self._known(active.tokens[:start])
            for row in self._sequences[active]:
                self._num_users[row] += 1
        sequence = self._sequences[active] = self._sequences.pop(active, [])
        return sequence

    def _drop(self, active: ActiveRequest) -> None:
        """Forget a request, known or not, and free the rows that no other one uses."""
        before = _ROOT
        for row, token in zip(self._sequences.pop(active, ()), active.tokens, strict=False):
            self._num_users[row] -= 1
            if not self._num_users[row]:
                del self._row_of[before, token]
                self._free.append(row)
            before = row


def _row_bytes(features: Tensor) -> int:
    return features.shape[1] * features.element_size()
