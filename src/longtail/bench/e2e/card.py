"""The card of `longtail bench e2e`."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from longtail.bench.common.card import Table, by_position, numbers
from longtail.bench.common.timing import Spread, ratios
from longtail.bench.e2e.arms import ACCEPT, COLD, OFF, SPOT, ArmResult, differing_share
from longtail.bench.e2e.by_running import Octave, by_running, plain_step
from longtail.bench.e2e.outlook import MeasuredStep, Outlook, outlook
from longtail.bench.e2e.plan import Setting

_MORE_WORKERS = (8, 32, 128)
_SHOWN_STEPS = 12
_LATER = 4
"""Fewest steps of a cold run whose later half is shown, too."""
_TELLING = 3
"""Fewest steps from which a gain is concluded: first steps are disturbed most."""
_NOTHING = 0.02
"""Share of a step's time within which a difference is none."""
_PARTS = ("rollout", "reward", "logprob", "update", "publish", "drafter", "step")


def tables(setting: Setting, found: Mapping[str, ArmResult]) -> list[Table]:
    """Return the comparison, the prediction for more workers, and the parts of a step."""
    off, predicted = found[OFF], _predictions(setting, found)
    error = _prediction_error(predicted, found)
    outlooks = Table(
        f"Prediction from measured lengths and costs; error for {setting.workers} workers "
        f"{error or 0.0:+.0%}",
        {
            "workers": lambda each: each.workers,
            "idle without drafts": lambda each: f"{each.idle_share:.0%}",
            "rollout speedup": lambda each: each.rollout_gain,
            "step speedup": lambda each: each.step_gain,
        },
        predicted,
    )
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
            f"Training {setting.model} end to end, {setting.workers} workers, "
            f"{setting.threads} thread(s) each, {setting.steps} steps in turn; speedups over the "
            "arm off; median (lowest-highest) over steps",
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
        *_octave_table(found),
        *([] if error is None else [outlooks]),
        Table(
            "Seconds of a step, medians", by_position("arm", *_PARTS, "spot stop latency"), parts
        ),
    ]


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


def _octaves(found: Mapping[str, ArmResult]) -> dict[str, tuple[Octave, ...]]:
    """Return the steps of each arm that drafted, by running requests."""
    return {
        name: by_running(each.series, plain_step(each.costs, each.lengths))
        for name, each in found.items()
        if each.costs is not None and each.lengths
    }


def _octave_table(found: Mapping[str, ArmResult]) -> list[Table]:
    """Return share and speed of the rollouts' steps by running requests; empty without drafts."""
    octaves = _octaves(found)
    lows = sorted({each.low for own in octaves.values() for each in own}, reverse=True)
    if not lows:
        return []

    def cell(own: tuple[Octave, ...], low: int) -> str:
        here = [each for each in own if each.low == low]
        return "".join(f"{each.share:.0%} at {each.speedup:.2f}x" for each in here)

    return [
        Table(
            "Running requests: share of the engine's time, and its speed over predicted plain "
            "decoding",
            by_position("arm", *(f"{low}-{2 * low - 1}" if low > 1 else "1" for low in lows)),
            [(name, *(cell(own, low) for low in lows)) for name, own in octaves.items()],
        )
    ]


def as_json(setting: Setting, found: Mapping[str, ArmResult]) -> dict[str, Any]:
    """Return every figure."""
    off = found[OFF]
    others = {name: result for name, result in found.items() if name != OFF}
    spot, predicted = found.get(SPOT), _predictions(setting, found)
    latencies = [] if spot is None else spot.column("cluster/spot_stop_latency_s")

    def speedups(part: str) -> dict[str, dict[str, float] | None]:
        return numbers({name: _speedup(off, result, part) for name, result in others.items()})

    def of_spot(metric: str) -> float | None:
        return None if spot is None else _median(spot, f"cluster/{metric}")

    def columns(arms: Mapping[str, ArmResult], metric: str) -> dict[str, list[float]]:
        return {name: each.column(metric) for name, each in arms.items()}

    return {
        "bench": "e2e",
        "model": setting.model,
        "workers": setting.workers,
        "steps": setting.steps,
        "switch_step": setting.switch_step,
        "step_speedup": speedups("step"),
        "rollout_speedup": speedups("rollout"),
        "cold_step_gain_by_step": _gain_by_step(off, found.get(COLD)),
        "differing_share": {name: differing_share(off, each) for name, each in others.items()},
        "rewards_agree": all(
            each.column("reward/mean") == off.column("reward/mean") for each in others.values()
        ),
        "policies_agree": all(each.policy == off.policy for each in others.values()),
        "idle_utilization": of_spot("idle_utilization"),
        "reused_share": of_spot("reused_share"),
        "stolen_share": of_spot("spot_stop_latency_share"),
        "checkpoint_ratio": None if spot is None else _checkpoint_ratio(spot),
        "stop_latency_s": {"median": _median_of(latencies), "max": max(latencies, default=0.0)},
        "accept_length": columns(others, ACCEPT),
        "by_running": {
            name: [asdict(each) for each in own] for name, own in _octaves(found).items()
        },
        "steps_until_frozen": _steps_until_frozen(found),
        "predicted": [asdict(each) for each in predicted],
        "prediction_error": _prediction_error(predicted, found),
        "reward": columns(found, "reward/mean"),
        "step_s": columns(found, "timing_s/step"),
        "rollout_s": columns(found, "timing_s/rollout"),
        "idle_share": {name: _idle_share(each) for name, each in found.items()},
        "last_step": {
            name: each.timeline.as_json() for name, each in found.items() if each.timeline
        },
    }


def _predictions(setting: Setting, found: Mapping[str, ArmResult]) -> list[Outlook]:
    """Predict the effect of spot with more workers; empty if spot was not measured."""
    off, spot = found[OFF], found.get(SPOT)
    if spot is None or spot.costs is None or not off.lengths:
        return []

    def writing_s(result: ArmResult) -> float:
        return _median(result, "cluster/generating_s") / setting.workers

    logprob_s, update_s = (off.column(f"timing_s/{part}") for part in ("logprob", "update"))
    measured = MeasuredStep(
        lengths=off.lengths,
        series=spot.series,
        costs=spot.costs,
        writing_s=(writing_s(off), writing_s(spot)),
        requests_per_worker=max(len(off.lengths) // (setting.steps * setting.workers), 1),
        learning_s=_median_of([a + b for a, b in zip(logprob_s, update_s, strict=True)]),
    )
    return outlook(measured, (setting.workers, *_MORE_WORKERS))


def _prediction_error(predicted: list[Outlook], found: Mapping[str, ArmResult]) -> float | None:
    """Return the relative error of the predicted rollout gain for the measured workers."""
    if not predicted:
        return None
    return predicted[0].rollout_gain / _speedup(found[OFF], found[SPOT], "rollout").median - 1.0


def _checkpoint_ratio(spot: ArmResult) -> dict[str, float] | None:
    """Return the blocking seconds of the drafter's checkpoint over those of a full one."""
    if not spot.saves:
        return None
    return ratios([s.own_s for s in spot.saves], [s.full_s for s in spot.saves]).numbers()


def _steps_until_frozen(found: Mapping[str, ArmResult]) -> int | None:
    """Return the steps after which the arm cold accepts as much as the arm frozen."""
    if COLD not in found or "frozen" not in found:
        return None
    both = zip(found[COLD].column(ACCEPT), found["frozen"].column(ACCEPT), strict=True)
    return next((step for step, (cold, frozen) in enumerate(both) if cold >= frozen), None)


def _gain_by_step(off: ArmResult, own: ArmResult | None) -> list[float] | None:
    """Return the speedup of each step; None without the arm."""
    if own is None:
        return None
    both = zip(off.column("timing_s/step"), own.column("timing_s/step"), strict=True)
    return [plain / mine for plain, mine in both]


def _speedup(off: ArmResult, own: ArmResult, part: str) -> Spread:
    return ratios(off.column(f"timing_s/{part}"), own.column(f"timing_s/{part}"))


def _median(result: ArmResult, name: str) -> float:
    return _median_of(result.column(name))


def _median_of(values: list[float]) -> float:
    return Spread.of(values).median if values else 0.0


def _idle_share(result: ArmResult) -> float:
    """Return the workers' idle share; spot training counts as idle time."""
    names = ("generating", "idle", "spot", "learning")
    sums = {name: sum(result.column(f"cluster/{name}_s")) for name in names}
    total = sum(sums.values())
    return (sums["idle"] + sums["spot"]) / total if total else 0.0
