"""Spot training: an idle worker trains a replica of the drafter until it is asked to stop.

    published --begin--> replica --train--> measured on held-out text --> the best one so far
                           ^  |                                              |
                           |  +-- stopped: finished micro-batches count,     |  mean, by tokens
                           |      the others are first in the next stretch   v
                         begin <------------------------------------ published, if it is better

Workers train independently and their replicas are averaged, so workers may join and leave. This
module owns a training copy of the drafter and its optimizer; the caller decides which workers are
idle, what is published, and how sequences and weights are transferred.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, final, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor

from longtail.drafter.eagle.layer import EagleLayer
from longtail.drafter.eagle.target_states import Interrupted
from longtail.drafter.eagle.trainer import DrafterTrainer, TrainerSettings
from longtail.drafter.training.buffer import DrafterBuffer, SequenceWindow
from longtail.drafter.training.replica_gain import Replica, SpotEnd, SpotReport
from longtail.drafter.weights import DrafterWeights, are_finite
from longtail.errors import NonFiniteError
from longtail.model.transformer import Transformer
from longtail.rl.packing import pack_sequences

_log = logging.getLogger("longtail")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotSettings:
    """Settings of spot training."""

    trainer: TrainerSettings
    batch_tokens: int
    tokens_per_micro_batch: int
    """Most tokens of a micro-batch; longer sequences are cut."""
    heldout_tokens: int = 384
    """Most tokens read in a measurement."""
    measure_every: int = 4
    """Updates between measurements."""
    num_depths: int = 6
    """Depths that are measured; more than are trained separates good drafters better."""


@dataclass(slots=True)
class _SinceBase:
    """Training since the published drafter from which the replica started."""

    num_tokens: int = 0
    num_unmeasured: int = 0
    """Updates since the last measurement."""
    seconds: float = 0.0
    """Seconds of earlier calls of `train`."""
    measured: Mapping[str, Tensor] | None = None
    """Weights at the last measurement."""


@final
class _Interval:
    """Report and measurements of one call of `train`."""

    def __init__(self, base: DrafterWeights) -> None:
        self.base, self.began_s, self.report = base, time.perf_counter(), SpotReport()
        self.base_sequences: tuple[SequenceWindow, ...] = ()
        self.base_accept_len = math.nan
        """Accept length of the base on `base_sequences`; the target does not change in one call."""

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.began_s

    def record(self, replica: Replica) -> None:
        """Keep the best replica; the last one if unmeasured."""
        best = max(filter(None, (replica, self.report.replica)), key=_rank)
        self.report.replica = replace(best, seconds=replica.seconds)


def _rank(replica: Replica) -> float:
    return -math.inf if math.isnan(replica.gain) else replica.gain


@runtime_checkable
class StateStore(Protocol):
    """The target's states at the tokens of sequences that an engine generated."""

    def has(self, tokens: Sequence[int]) -> bool:
        """Return whether the states of a sequence are there."""

    def find(self, tokens: Sequence[int]) -> Tensor | None:
        """Return the states of a sequence, under the target's present weights, or None.

        They are those of `eagle.target_states.training_taps`. The last row is never read.
        """


@final
class SpotTrainer:
    """Trains one replica at a time, from the drafter that was published last.

    The optimizer's moments persist across intervals and publications: starting from zero each time
    would spend a short interval on warming up.
    """

    def __init__(
        self,
        layer: EagleLayer,
        target: Transformer,
        settings: SpotSettings,
        *,
        draft_ids: Int[Tensor, "draft"] | None = None,
        head: Float[Tensor, "draft hidden"] | None = None,
        store: StateStore | None = None,
    ) -> None:
        self._trainer = DrafterTrainer(
            layer, target, settings.trainer, draft_ids=draft_ids, head=head
        )
        self._store, self._settings = store, settings
        self._min_len = settings.trainer.unroll_steps + 2
        """Tokens of the shortest sequence that is trained at every depth."""
        assert settings.tokens_per_micro_batch >= self._min_len, "no sequence would be long enough"
        self._base: DrafterWeights | None = None
        self._batch: tuple[SequenceWindow, ...] = ()
        """Sequences of an update that was stopped."""
        self._since = _SinceBase()

    def begin(self, published: DrafterWeights) -> None:
        """Start a replica from a published drafter; a replica of that version continues.

        Raises CheckpointError if the weights misfit. Unmeasured updates since an older version are
        kept.
        """
        if self._base is not None and published.version == self._base.version:
            return
        moved = self._unmeasured_moves()
        self._trainer.load_weights(published.tensors)
        added = {n: published.tensors[n].to(move.device) + move for n, move in moved.items()}
        self._trainer.load_weights({**published.tensors, **added})
        self._since, self._base = _SinceBase(), published

    def train(
        self,
        buffer: DrafterBuffer,
        stopped: Callable[[], bool],
    ) -> SpotReport:
        """Train on the buffer until stopped, or until no sequence is left.

        `stopped` is called before every micro-batch and often in it, and may add to the buffer. The
        next call continues behind the last finished micro-batch. If a value is not finite, the
        replica is reset to the published drafter, without moments.
        """
        if self._store is not None:
            buffer.prefer(self._store.has)
        base = self._base
        assert base is not None, "begin from a published drafter first"
        interval = _Interval(base)
        report = interval.report
        try:
            report.reason = self._train(buffer, stopped, interval)
        except Interrupted:
            report.reason = SpotEnd.STOPPED
        except NonFiniteError as error:
            _log.warning("spot training: %s; the replica is discarded", error)
            report.reason, report.replica = SpotEnd.NOT_FINITE, None
            self._trainer.restart(base.tensors)
            self._since = _SinceBase()
        report.seconds = interval.seconds
        self._since.seconds += report.seconds
        return report

    def _train(
        self,
        buffer: DrafterBuffer,
        stopped: Callable[[], bool],
        interval: _Interval,
    ) -> SpotEnd:
        settings, max_len = self._settings, self._settings.tokens_per_micro_batch
        while not stopped():
            if self._since.num_unmeasured >= settings.measure_every:
                replica = self._measure(buffer, stopped, interval)
                self._since.num_unmeasured, self._since.measured = 0, replica.weights
                interval.record(replica)
            sequences = self._batch or buffer.batch(settings.batch_tokens, max_len=max_len)
            sequences, self._batch = self._looked_up(sequences), ()
            if not sequences:
                return SpotEnd.NO_SEQUENCES
            try:
                report = self._trainer.step(pack_sequences(sequences, max_len), stopped)
            except Interrupted:
                self._batch = sequences
                raise
            self._since.num_tokens += report.num_trained
            self._since.num_unmeasured += 1
            interval.report.num_steps += 1
            interval.report.num_tokens += report.num_trained
            interval.report.num_reused += report.num_reused
        return SpotEnd.STOPPED

    def _measure(
        self, buffer: DrafterBuffer, stopped: Callable[[], bool], interval: _Interval
    ) -> Replica:
        """Compare the replica with its base; NaN without sequences."""
        base, weights = interval.base, self._trainer.weights()
        if not are_finite(weights):
            raise NonFiniteError(f"step {self._trainer.steps}: a weight is not finite")
        max_len = self._settings.tokens_per_micro_batch
        sequences = self._looked_up(buffer.heldout(self._settings.heldout_tokens, max_len=max_len))
        packed, num_depths = pack_sequences(sequences, max_len), self._settings.num_depths

        def accept_len() -> float:
            if not packed:
                return math.nan
            return self._trainer.evaluate(packed, num_depths, stopped).accept_len

        if sequences != interval.base_sequences:
            self._trainer.load_weights(base.tensors)
            try:
                interval.base_accept_len = accept_len()
            finally:
                self._trainer.load_weights(weights)
            interval.base_sequences = sequences
        own = accept_len()
        return Replica(
            base_version=base.version,
            weights=weights,
            num_tokens=self._since.num_tokens,
            seconds=self._since.seconds + interval.seconds,
            accept_len=own,
            base_accept_len=interval.base_accept_len,
        )

    def _looked_up(self, windows: Sequence[SequenceWindow]) -> tuple[SequenceWindow, ...]:
        """Return the windows that are long enough, and take their states from the store."""
        chosen = tuple(window for window in windows if len(window.tokens) >= self._min_len)
        self._trainer.reader.found = found = dict[tuple[int, ...], Tensor]()
        if self._store is not None:
            for each in chosen:
                states = self._store.find(each.sequence.tokens)
                if states is not None:
                    found[each.tokens] = states[each.start : each.start + len(each.tokens)]
        return chosen

    def _unmeasured_moves(self) -> dict[str, Tensor]:
        """Return the changes of parameters by the updates that were not measured yet."""
        if self._base is None or not self._since.num_unmeasured:
            return {}
        before = self._since.measured or self._base.tensors
        own = self._trainer.weights()
        return {name: each - before[name].to(each.device) for name, each in own.items()}
