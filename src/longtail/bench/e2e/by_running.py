"""Steps of rollouts with drafts, by the number of running requests: share of time and speed.

Steps are pooled by octaves of running requests. Each octave's speed is compared to that of plain
decoding, predicted by the cost model: plain steps are too few to be measured at each number.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from longtail.engine.rollout_log import RolloutSeries
from longtail.tuner.cost import CostModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Octave:
    """Engine steps with `low` to 2 x `low` - 1 running requests.

    Example: Octave(low=4, running=5.2, share=0.31, drafting_share=0.8, speedup=1.62)
    """

    low: int
    running: float
    """Mean number of running requests of a step."""
    share: float
    """Share of the engine's seconds."""
    drafting_share: float
    """Share of these steps that verify drafts."""
    speedup: float
    """Tokens/s over those predicted for plain decoding."""


def by_running(
    series: Sequence[RolloutSeries], plain_s: Callable[[int], float]
) -> tuple[Octave, ...]:
    """Return the octaves that occur; `plain_s` predicts a plain step by its running requests."""
    if not series:
        return ()
    running = np.concatenate([one.running for one in series]).clip(min=1)
    accepted = np.concatenate([one.accepted for one in series])
    drafting = np.concatenate([one.nodes for one in series]) > 0
    seconds = np.concatenate([np.diff(one.seconds, prepend=0.0) for one in series])
    # A step emits the accepted tokens and one more of each request; few are still in prefill.
    plain = np.array([plain_s(int(each)) for each in running]) * (running + accepted) / running
    octave = np.log2(running).astype(int)
    found = []
    for each in np.unique(octave):
        here = octave == each
        found.append(
            Octave(
                low=int(2**each),
                running=float(running[here].mean()),
                share=float(seconds[here].sum() / seconds.sum()),
                drafting_share=float(drafting[here].mean()),
                speedup=float(plain[here].sum() / seconds[here].sum()),
            )
        )
    return tuple(found)


def plain_step(costs: CostModel, lengths: Sequence[int]) -> Callable[[int], float]:
    """Return the seconds of a plain step by the number of running requests, at a mean context.

    A token drawn at random from all tokens has half of its text's length behind it.
    """
    sizes = np.asarray(lengths, dtype=np.float64)
    context = float((sizes**2).sum() / (2 * sizes.sum()))
    return lambda running: costs.plain.at(running) + costs.pair_s * running * context
