"""The card of `longtail bench e2e`."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from longtail.bench.common.card import Table, by_position, numbers
from longtail.bench.common.timing import Spread, ratios
from longtail.bench.e2e.arms import ACCEPT, COLD, OFF, SPOT, ArmResult, Plan, differing_share
from longtail.system.device import threads_each

_MORE_WORKERS = (8, 32, 128)
_SHOWN_STEPS = 12
_LATER = 4
"""Fewest steps of a cold run whose later half is shown, too."""
_TELLING = 3
"""Fewest steps from which a gain is concluded: first steps are disturbed most."""
_NOTHING = 0.02
"""Share of a step's time within which a difference is none."""
_PARTS = ("rollout", "reward", "learn", "publish", "drafter", "step")
_SIMULATED = 1000
"""Number of simulated rollouts."""


def sentences(found: Mapping[str, ArmResult]) -> list[str]:
    """Return what a user would gain, and whether the texts of the arms differ."""
    off, drafting = found[OFF], {name: each for name, each in found.items() if name != OFF}
    differing = max((differing_share(off, each) for each in drafting.values()), default=0.0)
    texts = (
        f"NOTE: up to {differing:.2%} of the texts differ from those of the arm off, so the arms "
        "did not make the same run."
        if differing
        else "All arms wrote the same texts."
    )
    return [*_gain(off, found), texts]


def _gain(off: ArmResult, found: Mapping[str, ArmResult]) -> list[str]:
    """Return the share of a step's time with a drafter that learns."""
    clauses: list[str] = []
    for name, what in ((SPOT, "trained before"), (COLD, "fresh at its start")):
        if name not in found or not off.metrics:
            continue
        own, plain = (each.column("timing_s/step") for each in (found[name], off))
        share = ratios(own, plain)
        clause = f"{share.median:.2f}x of the time ({what}: {_verdict(share.median, len(own))}"
        if name == COLD and len(own) >= _LATER:
            half = len(own) // 2
            later = ratios(own[half:], plain[half:]).median
            clause += (
                f"; in the last {len(own) - half} steps {later:.2f}x: {_verdict(later, len(own))}"
            )
        clauses.append(f"{clause})")
    if not clauses:
        return []
    together = ", and ".join(clauses)
    return [f"With a drafter that learns while you train, a step of this run took {together}."]


def _verdict(share: float, num_steps: int) -> str:
    """Return whether a share of the time is a gain, beyond what the machine's noise hides."""
    if num_steps < _TELLING:
        return "too few steps to tell"
    if share < 1.0 - _NOTHING:
        return "a gain"
    return "no gain" if share <= 1.0 + _NOTHING else "a loss"


def tables(plan: Plan, found: Mapping[str, ArmResult]) -> list[Table]:
    """Return the comparison, accept lengths, the prediction, and the parts of a step."""
    off, own = found[OFF], plan.arms[OFF]
    workers = own.cluster.workers
    parts = [
        (
            name,
            *(f"{_median(result, f'timing_s/{part}'):.2f}" for part in _PARTS),
            f"{_median(result, 'cluster/spot_stop_latency_s'):.3f}",
        )
        for name, result in found.items()
    ]
    return [
        Table(
            f"Training {own.model.path} end to end, {workers} workers, "
            f"{threads_each(own.run.threads, workers)} thread(s) each, {plan.steps} steps in turn; "
            "speedups over the arm off; median (lowest-highest) over steps",
            {
                "arm": lambda name: name,
                "step speedup": lambda name: _speedup(off, found[name], "step"),
                "rollout speedup": lambda name: _speedup(off, found[name], "rollout"),
                "accept length": lambda name: _median(found[name], ACCEPT) or None,
                "idle": lambda name: f"{_idle_share(found[name]):.0%}",
                "idle time used": lambda name: (
                    f"{_median(found[name], 'cluster/idle_utilization'):.0%}"
                ),
                "texts differ": lambda name: f"{differing_share(off, found[name]):.2%}",
            },
            list(found),
        ),
        *_accept_table(found),
        *_prediction_table(workers, found),
        Table(
            "Seconds of a step, medians", by_position("arm", *_PARTS, "spot stop latency"), parts
        ),
    ]


def _accept_table(found: Mapping[str, ArmResult]) -> list[Table]:
    """Return the accept length of some steps, evenly spaced; empty if no arm drafted."""
    lengths = {name: each.column(ACCEPT) for name, each in found.items()}
    rows = [(name, own) for name, own in lengths.items() if any(own)]
    if not rows:
        return []
    count = len(rows[0][1])
    shown = min(count, _SHOWN_STEPS)
    steps = sorted({round(i * (count - 1) / max(shown - 1, 1)) for i in range(shown)})
    cells = [(name, *(f"{own[step]:.2f}" for step in steps)) for name, own in rows]
    return [
        Table(
            "Accept length by step; 0 where nothing was drafted",
            by_position("arm", *(str(step + 1) for step in steps)),
            cells,
        )
    ]


# ---- more workers


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A mean training step of a number of workers, each as busy as a measured one.

    Example: Prediction(workers=32, idle_share=0.41, rollout_speedup=1.6, step_speedup=1.4)
    """

    workers: int
    idle_share: float
    """Idle share of the workers' time in a rollout without drafts."""
    rollout_speedup: float
    step_speedup: float
    """Speedup of a step whose other parts take as long as measured."""


def predict(
    plain_s: Sequence[float], drafted_s: Sequence[float], *, others_s: float, workers: int
) -> Prediction:
    """Predict a step of `workers` from the seconds that measured workers generated.

    Item i of `plain_s` and of `drafted_s` is the same worker in the same step, without drafts and
    with them. A rollout lasts until the slowest of `workers` random draws of i is done.

    Example: predict([1.0, 3.0], [1.0, 2.0], others_s=1.0, workers=100).rollout_speedup == 1.5
    """
    draws = np.random.default_rng(0).integers(len(plain_s), size=(_SIMULATED, workers))
    plain, drafted = np.asarray(plain_s)[draws], np.asarray(drafted_s)[draws]
    plain_rollout_s, drafted_rollout_s = (float(s.max(axis=1).mean()) for s in (plain, drafted))
    return Prediction(
        workers=workers,
        idle_share=1.0 - float(plain.mean()) / plain_rollout_s,
        rollout_speedup=plain_rollout_s / drafted_rollout_s,
        step_speedup=(plain_rollout_s + others_s) / (drafted_rollout_s + others_s),
    )


def _predictions(workers: int, found: Mapping[str, ArmResult]) -> list[Prediction]:
    """Predict the arm whose drafter learns, for the measured workers and for more of them.

    Nothing is predicted from too few steps.
    """
    off, own = found[OFF], found.get(SPOT, found.get(COLD))
    if own is None or len(off.worker_s) < _TELLING:
        return []
    plain_s, drafted_s = ([s for step in each.worker_s for s in step] for each in (off, own))
    steps, rollouts = off.column("timing_s/step"), off.column("timing_s/rollout")
    others_s = Spread.of([a - b for a, b in zip(steps, rollouts, strict=True)]).median
    return [
        predict(plain_s, drafted_s, others_s=others_s, workers=count)
        for count in (workers, *_MORE_WORKERS)
    ]


def _prediction_table(workers: int, found: Mapping[str, ArmResult]) -> list[Table]:
    """Return the prediction; the first line can be compared with what was measured."""
    predicted = _predictions(workers, found)
    if not predicted:
        return []
    return [
        Table(
            "Predicted for more workers, each as busy as a measured one",
            {
                "workers": lambda each: each.workers,
                "idle without drafts": lambda each: f"{each.idle_share:.0%}",
                "rollout speedup": lambda each: each.rollout_speedup,
                "step speedup": lambda each: each.step_speedup,
            },
            predicted,
        )
    ]


# ---- JSON


def as_json(plan: Plan, found: Mapping[str, ArmResult]) -> dict[str, Any]:
    """Return every figure."""
    own, off = plan.arms[OFF], found[OFF]
    others = {name: result for name, result in found.items() if name != OFF}

    def columns(metric: str) -> dict[str, list[float]]:
        return {name: each.column(metric) for name, each in found.items()}

    def speedups(part: str) -> dict[str, dict[str, float]]:
        return numbers({name: _speedup(off, each, part) for name, each in others.items()})

    return {
        "bench": "e2e",
        "model": own.model.path,
        "workers": own.cluster.workers,
        "steps": plan.steps,
        "step_speedup": speedups("step"),
        "rollout_speedup": speedups("rollout"),
        "differing_share": {name: differing_share(off, each) for name, each in others.items()},
        "rewards_agree": all(
            each.column("reward/mean") == off.column("reward/mean") for each in others.values()
        ),
        "policies_agree": all(each.policy == off.policy for each in others.values()),
        "idle_utilization": {
            name: _median(each, "cluster/idle_utilization") for name, each in others.items()
        },
        "stop_latency_s": columns("cluster/spot_stop_latency_s"),
        "accept_length": columns(ACCEPT),
        "predicted": [asdict(each) for each in _predictions(own.cluster.workers, found)],
        "reward": columns("reward/mean"),
        "step_s": columns("timing_s/step"),
        "rollout_s": columns("timing_s/rollout"),
        "idle_share": {name: _idle_share(each) for name, each in found.items()},
        "last_step": {
            name: each.timeline.as_json() for name, each in found.items() if each.timeline
        },
    }


def _speedup(off: ArmResult, own: ArmResult, part: str) -> Spread:
    return ratios(off.column(f"timing_s/{part}"), own.column(f"timing_s/{part}"))


def _median(result: ArmResult, name: str) -> float:
    values = result.column(name)
    return Spread.of(values).median if values else 0.0


def _idle_share(result: ArmResult) -> float:
    """Return the workers' idle share; work of idle workers counts as idle time."""
    names = ("generating", "idle", "spot", "learning_ahead", "learning")
    sums = {name: sum(result.column(f"cluster/{name}_s")) for name in names}
    total = sum(sums.values())
    return sum(sums[n] for n in ("idle", "spot", "learning_ahead")) / total if total else 0.0
