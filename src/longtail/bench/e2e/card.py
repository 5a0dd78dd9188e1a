"""How `longtail bench e2e` shows its arms: tables for people, one object for programs."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from longtail.bench.common.report import Spread, ratios
from longtail.bench.e2e.arms import ACCEPT, OFF, SPOT, ArmResult, differing_share
from longtail.bench.e2e.options import Setting
from longtail.bench.e2e.outlook import Outlook, outlook

Table = tuple[str, tuple[str, ...], list[list[str]]]
_MORE_WORKERS, LEARNING = (8, 32, 128), ("logprob", "update")
_PARTS = ("rollout", "reward", "logprob", "update", "publish", "drafter")


def tables(setting: Setting, found: Mapping[str, ArmResult]) -> list[Table]:
    """Return the comparison, and where the time of a step went."""
    steps = f"{setting.workers} workers x 1 thread, {setting.steps} steps in turn"
    return [
        (
            f"Training end to end, {steps}; median (lowest-highest) over steps",
            ("arm", "step, x of off", "rollout, x of off", "accept", "harvested", "texts differ"),
            [_row(name, found) for name in found],
        ),
        *_expected(setting, found),
        (
            "Seconds of a step, medians",
            ("arm", *_PARTS, "step", "stolen s"),
            [_parts(name, result) for name, result in found.items()],
        ),
    ]


def _expected(setting: Setting, found: Mapping[str, ArmResult]) -> list[Table]:
    columns = ("workers", "idle without drafts", "rollout, x of off", "step, x of off")
    predicted = _outlook(setting, found)
    rows = [
        [
            f"{each.workers}",
            f"{each.idle_share:.0%}",
            f"{each.rollout_gain:.2f}",
            f"{each.step_gain:.2f}",
        ]
        for each in predicted
    ]
    error = _prediction_error(predicted, found)
    title = "Predicted from measured lengths and costs; the measured workers first, error"
    return [] if error is None else [(f"{title} {error:+.0%}", columns, rows)]


def _outlook(setting: Setting, found: Mapping[str, ArmResult]) -> list[Outlook]:
    """Predict what spot does with more workers; nothing if it was not measured."""
    off, spot = found[OFF], found.get(SPOT)
    if spot is None or spot.costs is None or not off.lengths:
        return []
    learning = [
        a + b for a, b in zip(*(off.column(f"timing_s/{p}") for p in LEARNING), strict=True)
    ]
    return outlook(
        off.lengths,
        spot.series,
        spot.costs,
        writing_s=(_writing_s(setting, off), _writing_s(setting, spot)),
        requests_per_worker=max(len(off.lengths) // (setting.steps * setting.workers), 1),
        learning_s=_median_of(learning),
        workers=(setting.workers, *_MORE_WORKERS),
    )


def _writing_s(setting: Setting, result: ArmResult) -> float:
    """Seconds of a rollout in which a mean worker writes."""
    return _median(result, "cluster/generating_s") / setting.workers


def _prediction_error(predicted: Sequence[Outlook], found: Mapping[str, ArmResult]) -> float | None:
    """How far the rollout's gain, predicted for the measured workers, is from the measured one."""
    if not predicted:
        return None
    return predicted[0].rollout_gain / _speedup(found[OFF], found[SPOT], "rollout").median - 1.0


def as_json(setting: Setting, found: Mapping[str, ArmResult]) -> dict[str, Any]:
    """Return every figure."""
    off = found[OFF]
    others = {name: result for name, result in found.items() if name != OFF}
    step = {name: _speedup(off, result, "step") for name, result in others.items()}
    rollout = {name: _speedup(off, result, "rollout") for name, result in others.items()}
    spot, predicted = found.get(SPOT), _outlook(setting, found)
    stolen = [] if spot is None else spot.column("cluster/spot_stop_latency_s")
    return {
        "bench": "e2e",
        "model": setting.model,
        "workers": setting.workers,
        "steps": setting.steps,
        "switch_step": setting.switch_step,
        "step_speedup": {name: spread.numbers() for name, spread in step.items()},
        "rollout_speedup": {name: spread.numbers() for name, spread in rollout.items()},
        "differing_share": {name: differing_share(off, each) for name, each in others.items()},
        "rewards_agree": all(
            each.column("reward/mean") == off.column("reward/mean") for each in others.values()
        ),
        "idle_utilization": None if spot is None else _median(spot, "cluster/idle_utilization"),
        "reused_share": None if spot is None else _median(spot, "cluster/reused_share"),
        "stolen_share": None if spot is None else _median(spot, "cluster/spot_stop_latency_share"),
        "checkpoint_ratio": None if spot is None else _checkpoint_ratio(spot),
        "stop_latency_s": {"median": _median_of(stolen), "max": max(stolen, default=0.0)},
        "accept_length": {name: each.column(ACCEPT) for name, each in others.items()},
        "steps_until_frozen": _steps_until_frozen(found),
        "predicted": [asdict(each) for each in predicted],
        "prediction_error": _prediction_error(predicted, found),
        "reward": {name: each.column("reward/mean") for name, each in found.items()},
        "step_s": {name: each.column("timing_s/step") for name, each in found.items()},
        "rollout_s": {name: each.column("timing_s/rollout") for name, each in found.items()},
        "idle_share": {name: _idle(each) for name, each in found.items()},
    }


def _checkpoint_ratio(spot: ArmResult) -> dict[str, float] | None:
    """Blocking time of the drafter's checkpoint, of that of a full one that is waited for."""
    if not spot.saves:
        return None
    return ratios([s.own_s for s in spot.saves], [s.full_s for s in spot.saves]).numbers()


def _steps_until_frozen(found: Mapping[str, ArmResult]) -> int | None:
    """Steps after which a cold start accepts as much as the drafter that was trained before."""
    if "cold" not in found or "frozen" not in found:
        return None
    both = zip(found["cold"].column(ACCEPT), found["frozen"].column(ACCEPT), strict=True)
    return next((step for step, (cold, frozen) in enumerate(both) if cold >= frozen), None)


def _row(name: str, found: Mapping[str, ArmResult]) -> list[str]:
    off, own = found[OFF], found[name]
    accept = _median(own, ACCEPT)
    return [
        name,
        _speedup(off, own, "step").text(),
        _speedup(off, own, "rollout").text(),
        f"{accept:.2f}" if accept else "",
        f"{_median(own, 'cluster/idle_utilization'):.0%}",
        f"{differing_share(off, own):.2%}",
    ]


def _parts(name: str, result: ArmResult) -> list[str]:
    seconds = [_median(result, f"timing_s/{part}") for part in (*_PARTS, "step")]
    stolen = _median(result, "cluster/spot_stop_latency_s")
    return [name, *(f"{second:.2f}" for second in seconds), f"{stolen:.3f}"]


def _speedup(off: ArmResult, own: ArmResult, part: str) -> Spread:
    return ratios(off.column(f"timing_s/{part}"), own.column(f"timing_s/{part}"))


def _median(result: ArmResult, name: str) -> float:
    return _median_of(result.column(name))


def _median_of(values: list[float]) -> float:
    return Spread.of(values).median if values else 0.0


def _idle(result: ArmResult) -> float:
    """Share of the workers' time in which they neither generated nor learned nor trained."""
    names = ("generating", "idle", "spot", "learning")
    sums = {name: sum(result.column(f"cluster/{name}_s")) for name in names}
    total = sum(sums.values())
    return (sums["idle"] + sums["spot"]) / total if total else 0.0
