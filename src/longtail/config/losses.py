"""Names of losses and advantages; their functions are imported when they are called.

`learner.loss = "module:name"` is a function of yours, or a LossSpec; an advantage is a function.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any


@dataclass(frozen=True, slots=True)
class LossSpec:
    """A function from LossInputs and LossSettings to LossOutput (`rl.loss`), as in its paper."""

    function: Callable[..., Any]
    advantage: str = "grpo"
    normaliser: Callable[..., Any] = lambda batch: batch.num_sequences
    """Number by which the sum over a batch, a TrainBatch, is divided."""
    clip_low: float = 0.2
    clip_high: float = 0.2
    dynamic_sampling: bool = False


def _ours(path: str) -> Callable[..., Any]:
    return lambda *given: resolve_name(f"longtail.rl.{path}")(*given)


_SUM = _ours("loss:token_sum")
LOSSES = {
    "grpo": LossSpec(_ours("loss:sequence_means")),
    "dr_grpo": LossSpec(_SUM, "dr_grpo", lambda it: it.num_sequences * it.sampling.max_tokens),
    "dapo": LossSpec(
        _SUM, normaliser=lambda it: max(it.num_generated, 1), clip_high=0.28, dynamic_sampling=True
    ),
    "gspo": LossSpec(_ours("loss:gspo"), clip_low=3e-4, clip_high=4e-4),
    "rloo": LossSpec(_ours("loss:rloo"), "rloo"),
    "reinforce_pp": LossSpec(_SUM, "reinforce_pp", lambda it: max(it.num_generated, 1)),
}
ADVANTAGES = {n: _ours(f"advantage:{n}") for n in ("grpo", "dr_grpo", "rloo", "reinforce_pp")}


def choices(names: Iterable[str]) -> str:
    """Return the names, and how one of yours is named."""
    return f"{', '.join(names)}, or `module:function`"
