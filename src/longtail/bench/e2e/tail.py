"""What more workers would do: a first simulation of the tail, from the lengths that were measured.

    running   4 |####
              3 |....#####
              2 |.........######          a worker: one step a token, dearer the more are running
              1 |...............##########################
                 0 -----------------------------------> its time; the others wait for the last one

Assumptions. Each of them is named because it is wrong somewhere:

    lengths    of a rollout are independent draws from the measured ones. PromptGroup are alike, and
    so
               are prompts that are placed together: real workers differ more. And nothing is longer
               than what was measured, however many workers draw: real tails go on.
    requests   of a worker run all at once, from the beginning; reading prompts costs nothing
    a step     costs what its number of running requests says; contexts cost nothing
    a draft    advances all running requests alike, by `speedup`, at any length of their contexts
    workers    are equally fast, do not disturb each other, and begin at the same time
    spot       costs the rollout nothing, and is what keeps `speedup` where it is
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

_ROLLOUTS = 64
"""Simulated ones that are averaged: a single one is as random as its longest completion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The mean rollout of so many workers.

    Example: Prediction(idle_share=0.41, idle_share_spot=0.32, rollout_s_off=18.2,
                        rollout_s_spot=8.1, gain=2.25)
    """

    idle_share: float
    """Of all workers' time until the last of them is done, decoding plainly."""
    idle_share_spot: float
    """The same with drafts; what idle workers train is not counted."""
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
    """Predict a rollout of so many workers from measured completion lengths, in tokens.

    `step_s` gives the seconds of a plain engine step by the number of running requests, `speedup`
    how many times as many tokens a second come with drafts: below 1, if that is what they do. The
    same arguments give the same prediction.
    """
    shape = (_ROLLOUTS, workers, requests_per_worker)
    drawn = np.random.default_rng(seed).choice(np.asarray(lengths, dtype=np.int64), size=shape)
    numbers = range(1, requests_per_worker + 1)
    plain_s = np.array([step_s(running) for running in numbers], dtype=np.float64)
    faster = np.array([speedup(running) for running in numbers], dtype=np.float64)
    plain = worker_seconds(drawn, plain_s)
    spot = worker_seconds(drawn, plain_s / faster)
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
    """Return the time in which each worker writes its completions, all begun at once.

    `token_s[n - 1]` is what a token of each costs while n are running.

    Example: lengths (1, 3), token_s (2.0, 3.0): one token for both, two for the longer one alone,
             3.0 + 2 * 2.0 = 7.0
    """
    ended = np.sort(lengths, axis=-1)
    tokens = np.diff(ended, axis=-1, prepend=0)  # with all running, then all but one, ...
    return tokens @ token_s[::-1]
