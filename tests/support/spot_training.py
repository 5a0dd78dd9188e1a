"""A spot trainer with a tiny target and a buffer of texts that can be learned."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor

from longtail.config.sections import OptimizerSection
from longtail.drafter.eagle.fresh import fresh_drafter
from longtail.drafter.eagle.layer import EagleConfig
from longtail.drafter.eagle.trainer import TrainerSettings
from longtail.drafter.training.buffer import DrafterBuffer, SequenceSnapshot
from longtail.drafter.training.replica_gain import Replica
from longtail.drafter.training.spot import SpotSettings, SpotTrainer
from longtail.drafter.weights import DrafterWeights, copy_parameters
from longtail.model.transformer import Transformer
from longtail.rl.data.examples import Example
from longtail.rl.packing import pack_sequences
from support.tiny_models import tiny_model

SETTINGS = SpotSettings(
    trainer=TrainerSettings(unroll_steps=2, optimizer=OptimizerSection(learning_rate=1e-2)),
    batch_tokens=60,
    tokens_per_micro_batch=24,
    heldout_tokens=60,
    num_depths=2,
    measure_every=3,
)


def counting(number: int, length: int, *, step: int = 0) -> SequenceSnapshot:
    """Text that counts up from somewhere, in one of two steps."""
    start, by = 5 + 7 * number % 40, 1 + number % 2
    return SequenceSnapshot(
        request_id=f"train/{number}@0#0",
        tokens=tuple(start + by * i for i in range(length)),
        prompt_len=3,
        step=step,
    )


def make_buffer() -> DrafterBuffer:
    buffer = DrafterBuffer(10**6, seed=4)
    buffer.add(counting(number, 9 + number % 20) for number in range(30))
    return buffer


@final
class SpotSetup:
    """A spot trainer begun from version 1 of a fresh drafter."""

    def __init__(self, settings: SpotSettings = SETTINGS, *, matrix_rate: float | None = None):
        self.target: Transformer = tiny_model()
        config = EagleConfig(recipe="eagle3", target=self.target.config, layers=(0, 1), window=8)
        sample = pack_sequences([Example(tokens=counting(1, 40).tokens, prompt_len=3)], 100)[0]
        layer = fresh_drafter(config, self.target, sample, torch.Generator().manual_seed(3))
        self.published = DrafterWeights(version=1, tensors=copy_parameters(layer))
        teaching = replace(settings.trainer, matrix_rate=matrix_rate)
        self.spot = SpotTrainer(layer, self.target, replace(settings, trainer=teaching))
        self.spot.begin(self.published)
        self.layer, self.buffer = layer, make_buffer()
        self.measured: list[Replica] = []
        measure = self.spot._measure

        def measured(*args: Any) -> Replica:
            self.measured.append(measure(*args))
            return self.measured[-1]

        self.spot._measure = measured  # type: ignore[method-assign]
        self.num_passes = 0
        # The features of a micro-batch go through `fc` once.
        layer.fc.register_forward_hook(lambda *_: self._count())

    def _count(self) -> None:
        self.num_passes += 1

    def train(self, stopped: Callable[[], bool]):
        return self.spot.train(self.buffer, stopped)

    def tensors(self) -> dict[str, Tensor]:
        """Weights and moments."""
        return self.spot._trainer.tensors()


def replica(
    gain: float, seconds: float = 1.0, *, base: int = 0, weight: float = 1.0, tokens: int = 100
) -> Replica:
    """Return a replica of one weight, which accepts a share of `gain` more than 2 tokens."""
    return Replica(
        base_version=base,
        weights={"w": torch.tensor([weight])},
        num_tokens=tokens,
        seconds=seconds,
        accept_len=2.0 * (1.0 + gain),
        base_accept_len=2.0,
    )


def stop_at(call: int) -> Callable[[], bool]:
    """Return a function that is true from the call with this number on, counted from 0."""
    calls = iter(range(10**9))
    return lambda: next(calls) >= call


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)
