"""Spot training: an idle worker teaches a replica of the drafter until it is told to stop.

    published --begin--> replica --train--> measured on held-out text --> the best one so far
                           ^  |                                              |
                           |  +-- stopped at any micro-batch: as after       |  merge: by tokens
                           |      the last whole update                      v
                         begin <------------------------------------ published, if it is better

Workers train apart and are averaged when they are done, so any of them may come and go. It owns a
training copy of the drafter and its optimizer. Who is idle, what is published, and how texts and
weights travel is the caller's business.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import final

from jaxtyping import Float, Int
from torch import Tensor

from longtail.drafter.eagle.layer import EagleLayer
from longtail.drafter.eagle.weights import DrafterWeights, are_finite, weighted_mean
from longtail.drafter.training.buffer import DrafterBuffer
from longtail.drafter.training.reader import StateLookup
from longtail.drafter.training.texts import pack_texts
from longtail.drafter.training.trainer import DrafterTrainer, TrainerSettings
from longtail.errors import NonFiniteError
from longtail.model.transformer import Transformer
from longtail.rl.data.examples import Example
from longtail.types import PackedSequences

_log = logging.getLogger("longtail")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotSettings:
    """How a replica is taught while its worker is idle.

    Example: SpotSettings(trainer=TrainerSettings(), batch_tokens=2048, tokens_per_micro_batch=512,
                          heldout_tokens=2048, measure_every=8, num_depths=6, min_gain=0.005,
                          patience=3)
    """

    trainer: TrainerSettings
    batch_tokens: int
    tokens_per_micro_batch: int
    """Longer texts are cut, so a stop is honoured within so many tokens."""
    heldout_tokens: int
    """Read in a measurement, at most."""
    measure_every: int
    """Updates between measurements."""
    num_depths: int
    """Depths that are measured; more than are trained tell drafters apart that are good."""
    min_gain: float
    """Relative to the best so far: what an expected accept length must rise by to count."""
    patience: int
    """Measurements without such a rise after which training no longer pays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """A drafter trained from a published one, and what both give on the same held-out text.

    Example: Replica(base_version=3, weights=trainer.weights(), num_tokens=16_000, num_steps=8,
                     accept_len=2.61, base_accept_len=2.44), whose gain is 0.07
    """

    base_version: int
    weights: Mapping[str, Tensor]
    num_tokens: int
    """Learned since the base, repeats included."""
    num_steps: int
    accept_len: float
    """Expected, of a chain as deep as is measured; NaN where nothing was held out."""
    base_accept_len: float

    @property
    def gain(self) -> float:
        """Relative rise of the expected accept length; NaN, hence above nothing, if unmeasured."""
        return self.accept_len / self.base_accept_len - 1.0


class SpotEnd(StrEnum):
    """Why a stretch of spot training ended."""

    STOPPED = "stopped"
    """The caller said so."""
    NO_TEXTS = "no texts"
    """There was nothing to learn."""
    NO_GAIN = "no gain"
    """It no longer paid."""
    NOT_FINITE = "not finite"
    """NaN or infinity turned up; the replica was discarded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotReport:
    """What a stretch of spot training did.

    Example: SpotReport(num_steps=41, num_tokens=80_000, num_reused=60_000, seconds=9.7,
                        max_micro_step_s=0.06, reason=SpotEnd.STOPPED, replica=replica)
    """

    num_steps: int
    num_tokens: int
    """Learned."""
    num_reused: int
    """Of these, those whose features the engine had; the others' were computed again."""
    seconds: float
    max_micro_step_s: float
    """The longest time for which nobody was asked whether to stop."""
    reason: SpotEnd
    replica: Replica | None
    """The best that this stretch measured."""


@final
class _Stretch:
    """What one call did and measured: the best replica, and whether they still rise."""

    def __init__(self, settings: SpotSettings) -> None:
        self._settings = settings
        self._reached = 1.0
        """Accept length relative to the base, when it last rose enough."""
        self._flat = 0
        """Measurements since."""
        self.num_steps = self.num_tokens = self.num_reused = 0
        self.best: Replica | None = None
        self.base_texts: tuple[Example, ...] = ()
        self.base_accept_len: float | None = math.nan
        """Of the base on those texts: the target does not change in one call."""

    @property
    def pays(self) -> bool:
        """Whether to go on; where nothing is held out, who could say not to."""
        return self._flat < self._settings.patience

    def note(self, replica: Replica) -> Replica:
        """Take note of a measurement; return the best so far, of unmeasured ones the last."""
        if self.best is None or _rank(replica) >= _rank(self.best):
            self.best = replica
        if math.isnan(replica.gain):
            return self.best
        if 1.0 + replica.gain >= self._reached * (1.0 + self._settings.min_gain):
            self._reached, self._flat = 1.0 + replica.gain, 0
        else:
            self._flat += 1
        return self.best


@final
class _Watch:
    """Asks whether to stop until it was told so once, and times how long nobody was asked."""

    def __init__(self, stopped: Callable[[], bool]) -> None:
        self._stopped = stopped
        self._is_stopped = False
        self._asked = time.perf_counter()
        self.longest_s = 0.0

    def __call__(self) -> bool:
        self.lap()
        self._is_stopped = self._is_stopped or self._stopped()
        self._asked = time.perf_counter()
        return self._is_stopped

    def lap(self) -> None:
        """End the time for which nobody was asked."""
        self.longest_s = max(self.longest_s, time.perf_counter() - self._asked)


def _rank(replica: Replica) -> float:
    return -math.inf if math.isnan(replica.gain) else replica.gain


@final
class SpotTrainer:
    """Trains one replica at a time, from the drafter that was published last.

    The optimizer's moments are kept from stretch to stretch, and when another drafter is published:
    they tell how steep and how noisy the loss is around here, and the average of replicas that
    started at one point is still around here. To begin from nothing each time would spend a short
    stretch on warming up.
    """

    def __init__(
        self,
        layer: EagleLayer,
        target: Transformer,
        settings: SpotSettings,
        *,
        draft_ids: Int[Tensor, "draft"] | None = None,
        head: Float[Tensor, "draft hidden"] | None = None,
        lookup: StateLookup | None = None,
    ) -> None:
        self._trainer = DrafterTrainer(
            layer, target, settings.trainer, draft_ids=draft_ids, head=head, lookup=lookup
        )
        self._settings = settings
        self._shortest = settings.trainer.unroll_steps + 2
        """A text of so many tokens, the last one generated, is learned at every depth."""
        assert settings.tokens_per_micro_batch >= self._shortest, "no text would be long enough"
        self._base: DrafterWeights | None = None
        self._num_steps = self._num_tokens = self._unmeasured = 0

    @property
    def base_version(self) -> int | None:
        """Version of the drafter that the replica started from; None before the first."""
        return None if self._base is None else self._base.version

    def begin(self, published: DrafterWeights) -> None:
        """Start from a published drafter, or go on if this replica did; CheckpointError if misfit.

        What a replica learned from an older one is let go: it is in the published one, or did not
        pay.
        """
        if published.version == self.base_version:
            return
        self._trainer.load_weights(published.tensors)
        self._base = published
        self._count_anew()

    def train(
        self,
        buffer: DrafterBuffer,
        stopped: Callable[[], bool],
        on_measured: Callable[[Replica], None],
    ) -> SpotReport:
        """Learn from the buffer until stopped, or until there is no point in going on.

        `stopped` is asked before every micro-batch; it may fill the buffer meanwhile. A stop leaves
        weights, moments and buffer as they were after the last whole update. After every
        measurement `on_measured` is given the best replica of this stretch. What is not finite is
        discarded, never raised: the replica is the published drafter again, without moments.
        """
        watch, stretch = _Watch(stopped), _Stretch(self._settings)
        started, base = time.perf_counter(), self._require_base()
        try:
            reason = self._learn(buffer, watch, stretch, on_measured)
        except NonFiniteError as error:
            _log.warning("spot training: %s; the replica is discarded", error)
            reason, stretch.best = SpotEnd.NOT_FINITE, None
            self._trainer.restart(base.tensors)
            self._count_anew()
        watch.lap()
        return SpotReport(
            num_steps=stretch.num_steps,
            num_tokens=stretch.num_tokens,
            num_reused=stretch.num_reused,
            seconds=time.perf_counter() - started,
            max_micro_step_s=watch.longest_s,
            reason=reason,
            replica=stretch.best,
        )

    def probe(self, weights: Mapping[str, Tensor], texts: Sequence[Example]) -> tuple[float, float]:
        """Return the expected accept length of the drafter begun from, and of one that is offered.

        For whoever receives a drafter: a few texts tell whether it arrived as one of this target.
        Both are NaN where no text is long enough. The replica is left as it is; CheckpointError if
        the weights offered are misshapen.
        """
        packed = pack_texts(self._teachable(texts), self._settings.tokens_per_micro_batch)
        found: list[float] = []
        for each in (self._require_base().tensors, weights):
            with self._lent(each):
                found.append(self._expected(packed) if packed else math.nan)
        return found[0], found[1]

    def _learn(
        self,
        buffer: DrafterBuffer,
        watch: _Watch,
        stretch: _Stretch,
        on_measured: Callable[[Replica], None],
    ) -> SpotEnd:
        settings, longest = self._settings, self._settings.tokens_per_micro_batch
        while not watch():
            if self._unmeasured >= settings.measure_every:
                replica = self._measure(buffer, watch, stretch)
                if replica is None:
                    break
                self._unmeasured = 0
                on_measured(stretch.note(replica))
                if not stretch.pays:
                    return SpotEnd.NO_GAIN
            texts = self._teachable(buffer.batch(settings.batch_tokens, max_len=longest))
            if not texts:
                return SpotEnd.NO_TEXTS
            report = self._trainer.try_step(pack_texts(texts, longest), watch)
            if report is None:
                buffer.put_back()
                break
            self._num_steps += 1
            self._num_tokens += report.num_trained
            self._unmeasured += 1
            stretch.num_steps += 1
            stretch.num_tokens += report.num_trained
            stretch.num_reused += report.num_reused
        return SpotEnd.STOPPED

    def _measure(
        self, buffer: DrafterBuffer, stopped: Callable[[], bool], stretch: _Stretch
    ) -> Replica | None:
        """Compare the replica with its base; None if stopped."""
        base, weights = self._require_base(), self._trainer.weights()
        if not are_finite(weights):
            raise NonFiniteError(f"step {self._trainer.steps}: a weight is not finite")
        longest = self._settings.tokens_per_micro_batch
        texts = self._teachable(buffer.heldout(self._settings.heldout_tokens, max_len=longest))
        packed = pack_texts(texts, longest)
        if texts != stretch.base_texts:
            with self._lent(base.tensors):
                stretch.base_accept_len = self._accept_len(packed, stopped)
            stretch.base_texts = texts
        own = self._accept_len(packed, stopped)
        if own is None or stretch.base_accept_len is None:
            return None
        return Replica(
            base_version=base.version,
            weights=weights,
            num_tokens=self._num_tokens,
            num_steps=self._num_steps,
            accept_len=own,
            base_accept_len=stretch.base_accept_len,
        )

    def _accept_len(
        self, packed: Sequence[PackedSequences], stopped: Callable[[], bool]
    ) -> float | None:
        """Measure; NaN if there is nothing to measure on, None if stopped."""
        if not packed:
            return math.nan
        depths = self._trainer.try_evaluate(packed, stopped, self._settings.num_depths)
        return None if depths is None else depths.accept_len

    def _expected(self, packed: Sequence[PackedSequences]) -> float:
        return self._trainer.evaluate(packed, self._settings.num_depths).accept_len

    @contextmanager
    def _lent(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Let the layer hold other weights for a moment."""
        own = self._trainer.weights()
        self._trainer.load_weights(weights)
        try:
            yield
        finally:
            self._trainer.load_weights(own)

    def _teachable(self, texts: Sequence[Example]) -> tuple[Example, ...]:
        return tuple(text for text in texts if len(text.tokens) >= self._shortest)

    def _count_anew(self) -> None:
        self._num_steps = self._num_tokens = self._unmeasured = 0

    def _require_base(self) -> DrafterWeights:
        assert self._base is not None, "begin from a published drafter first"
        return self._base


def merge(replicas: Sequence[Replica]) -> dict[str, Tensor]:
    """Average replicas of one base, weighted by the tokens that each has learned (local SGD).

    Of several bases the newest counts. Replicas that are not finite, or have learned nothing, are
    left out; one at least must be left. Equal replicas stay as they are to the last bit. Stich
    2018 (arXiv 1805.09767) bounds what averaging costs while replicas stay near each other.
    """
    newest = max(replica.base_version for replica in replicas)
    kept = [
        replica
        for replica in replicas
        if replica.base_version == newest and replica.num_tokens and are_finite(replica.weights)
    ]
    assert kept, "no replica is left to merge"
    return weighted_mean([each.weights for each in kept], [each.num_tokens for each in kept])
