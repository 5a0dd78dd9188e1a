"""A simulation of the long tail with more workers, from measured completion lengths.

    running   4 |####
              3 |....#####
              2 |.........######          a worker: one step a token, slower with more running
              1 |...............##########################
                 0 -----------------------------------> its time; the others wait for the last one

Assumptions, all of them simplifications:

    lengths    of a rollout are independent draws from the measured ones. Completions of one prompt
               are alike, so real workers differ more; real tails go on beyond the measured ones
    requests   of a worker all start at the beginning; prefill costs nothing
    a step     costs a function of the number of running requests; contexts cost nothing
    a draft    advances all running requests alike, by `speedup`, at any length of their contexts
    workers    are equally fast, do not disturb each other, and start at the same time
    spot       costs the rollout nothing and keeps `speedup` as it is
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

_ROLLOUTS = 64
"""Simulated rollouts averaged: a single one depends on its longest completion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The mean simulated rollout.

    Example: Prediction(idle_share=0.41, idle_share_spot=0.32, rollout_s_off=18.2,
                        rollout_s_spot=8.1, gain=2.25)
    """

    idle_share: float
    """Idle share of all workers' time until the last one finishes, without drafts."""
    idle_share_spot: float
    """The same with drafts; training on idle workers counts as idle."""
    rollout_s_off: float
    rollout_s_spot: float
    gain: float
    """rollout_s_off / rollout_s_spot."""


def predict(
    lengths: Sequence[int],
    *,
    step_s: Callable[[int], float],
    speedup: Callable[[int], float],
    workers: int,
    requests_per_worker: int,
    seed: int,
) -> Prediction:
    """Predict a rollout of `workers` from measured completion lengths, in tokens.

    `step_s` is the seconds of a plain engine step by the number of running requests, `speedup` the
    tokens/s with drafts over those without. The same arguments give the same prediction.
    """
    shape = (_ROLLOUTS, workers, requests_per_worker)
    drawn = np.random.default_rng(seed).choice(np.asarray(lengths, dtype=np.int64), size=shape)
    numbers = range(1, requests_per_worker + 1)
    plain_s = np.array([step_s(running) for running in numbers], dtype=np.float64)
    speedups = np.array([speedup(running) for running in numbers], dtype=np.float64)
    plain = worker_seconds(drawn, plain_s)
    spot = worker_seconds(drawn, plain_s / speedups)
    rollout_s_off, rollout_s_spot = (float(each.max(axis=1).mean()) for each in (plain, spot))
    return Prediction(
        idle_share=1.0 - float(plain.mean()) / rollout_s_off,
        idle_share_spot=1.0 - float(spot.mean()) / rollout_s_spot,
        rollout_s_off=rollout_s_off,
        rollout_s_spot=rollout_s_spot,
        gain=rollout_s_off / rollout_s_spot,
    )


def worker_seconds(
    lengths: Int[np.ndarray, "*workers requests"], token_s: Float[np.ndarray, "requests"]
) -> Float[np.ndarray, "*workers"]:
    """Return the seconds in which each worker writes its completions, all started at once.

    `token_s[n - 1]` is the seconds of a step with n running requests.

    Example: lengths (1, 3), token_s (2.0, 3.0): one token for both, two for the longer one alone,
             3.0 + 2 * 2.0 = 7.0
    """
    ended = np.sort(lengths, axis=-1)
    tokens = np.diff(ended, axis=-1, prepend=0)  # with all running, then all but one, ...
    return tokens @ token_s[::-1]
