"""What `longtail bench e2e` expects of more workers, from what its own ones wrote and took.

How long a worker writes is measured: plainly by off's workers, with drafts by spot's. How long it
then waits for the last one is simulated from the measured lengths (`bench.e2e.tail`, its
assumptions included). Assumed beside those:

    many workers    write, in the mean, as long as the measured ones did
    a plain step    is as much shorter with few running than with many as spot's cost model says,
                    which saw few of them: proportions are taken from it, no seconds
    a drafting one  is as much faster as it was in spot's rollouts with so many running

The prediction for as many workers as were measured is shown with its error.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from longtail.bench.e2e.tail import predict
from longtail.engine.rollout_log import RolloutSeries
from longtail.tuner.cost import CostModel

_SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """A mean training step of so many workers, each with as many requests as the measured ones.

    Example: Outlook(workers=32, idle_share=0.62, rollout_gain=2.9, step_gain=2.2)
    """

    workers: int
    idle_share: float
    """Of the workers' time in a plain rollout."""
    rollout_gain: float
    step_gain: float
    """Of rollout and learning, which takes each worker as long as it did."""


def outlook(
    lengths: Sequence[int],
    series: Sequence[RolloutSeries],
    costs: CostModel,
    *,
    writing_s: tuple[float, float],
    requests_per_worker: int,
    learning_s: float,
    workers: Sequence[int],
) -> list[Outlook]:
    """Predict a step for each number of workers.

    `lengths` are those of the completions, in tokens; `series` the rollouts that drafted.
    `writing_s` is for how long a mean worker writes in a rollout, plainly and with drafts.
    """
    plain_s = plain_step(costs, lengths)
    faster = speedup_by_running(series, plain_s)
    found = []
    for number in workers:
        predicted = predict(
            lengths,
            step_s=plain_s,
            speedup=faster,
            workers=number,
            requests_per_worker=requests_per_worker,
            seed=_SEED,
        )
        idle_shares = (predicted.idle_share, predicted.idle_share_spot)
        off, spot = (s / (1.0 - idle) for s, idle in zip(writing_s, idle_shares, strict=True))
        found.append(
            Outlook(
                workers=number,
                idle_share=predicted.idle_share,
                rollout_gain=off / spot,
                step_gain=(off + learning_s) / (spot + learning_s),
            )
        )
    return found


def plain_step(costs: CostModel, lengths: Sequence[int]) -> Callable[[int], float]:
    """Return the seconds of a plain step by the number of running requests, at a mean context.

    A token drawn at random from all that are written has half of its text's length behind it.
    """
    sizes = np.asarray(lengths, dtype=np.float64)
    context = float((sizes**2).sum() / (2 * sizes.sum()))
    return lambda running: costs.plain.at(running) + costs.pair_s * running * context


def speedup_by_running(
    series: Sequence[RolloutSeries], plain_s: Callable[[int], float]
) -> Callable[[int], float]:
    """Return how many times as many tokens a second came with drafts, by requests running.

    Steps are pooled by octaves of running requests, and what lies between is interpolated.
    """
    running = np.concatenate([one.running for one in series]).clip(min=1)
    accepted = np.concatenate([one.accepted for one in series])
    seconds = np.concatenate([np.diff(one.seconds, prepend=0.0) for one in series])
    # A step emits what was accepted and one token more of each request; prompts that are still
    # being read are few.
    plain = np.array([plain_s(int(each)) for each in running]) * (running + accepted) / running
    octave = np.log2(running).astype(int)
    places, gains = [], []
    for each in np.unique(octave):
        here = octave == each
        places.append(float(running[here].mean()))
        gains.append(float(plain[here].sum() / seconds[here].sum()))
    return lambda number: float(np.interp(number, places, gains))
