"""Prediction of `longtail bench e2e` for more workers, from the measured ones.

The time in which a worker writes is measured: without drafts in the arm off, with drafts in spot.
The time for which it then waits for the last worker is simulated from the measured lengths
(`bench.e2e.tail`, with its assumptions). Further assumptions:

    many workers       write, in the mean, as long as the measured ones
    a plain step       is shorter with few running requests in the proportion of spot's cost model;
                       no seconds are taken from the model, which saw few plain steps
    a drafting step    is as much faster as in spot's rollouts with as many running requests

The prediction for the measured number of workers is shown with its error.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from longtail.bench.e2e.by_running import by_running, plain_step
from longtail.bench.e2e.tail import predict
from longtail.engine.rollout_log import RolloutSeries
from longtail.tuner.cost import CostModel

_SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """A mean training step of `workers`, each with as many requests as the measured ones.

    Example: Outlook(workers=32, idle_share=0.62, rollout_gain=2.9, step_gain=2.2)
    """

    workers: int
    idle_share: float
    """Idle share of the workers' time in a rollout without drafts."""
    rollout_gain: float
    step_gain: float
    """Gain of rollout and learning together; learning takes as long as measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """Figures of the measured workers."""

    lengths: Sequence[int]
    """Tokens of each completion."""
    series: Sequence[RolloutSeries]
    """Rollouts with drafts."""
    costs: CostModel
    writing_s: tuple[float, float]
    """Seconds in which a mean worker writes in a rollout, without and with drafts."""
    requests_per_worker: int
    learning_s: float


def outlook(measured: MeasuredStep, workers: Sequence[int]) -> list[Outlook]:
    """Predict a step for each number of workers."""
    plain_s = plain_step(measured.costs, measured.lengths)
    speedup, learning_s = speedup_by_running(measured.series, plain_s), measured.learning_s
    found = []
    for number in workers:
        predicted = predict(
            measured.lengths,
            step_s=plain_s,
            speedup=speedup,
            workers=number,
            requests_per_worker=measured.requests_per_worker,
            seed=_SEED,
        )
        plain_writing_s, spot_writing_s = measured.writing_s
        off = plain_writing_s / (1.0 - predicted.idle_share)
        spot = spot_writing_s / (1.0 - predicted.idle_share_spot)
        found.append(
            Outlook(
                workers=number,
                idle_share=predicted.idle_share,
                rollout_gain=off / spot,
                step_gain=(off + learning_s) / (spot + learning_s),
            )
        )
    return found


def speedup_by_running(
    series: Sequence[RolloutSeries], plain_s: Callable[[int], float]
) -> Callable[[int], float]:
    """Return tokens/s with drafts over those without, by the number of running requests.

    Numbers between the octaves are interpolated.
    """
    octaves = by_running(series, plain_s)
    numbers, gains = [each.running for each in octaves], [each.speedup for each in octaves]
    return lambda number: float(np.interp(number, numbers, gains))
