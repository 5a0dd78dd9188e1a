"""The card of `longtail bench e2e`: its tables and its conclusion."""

from collections.abc import Mapping
from typing import Any

from longtail.bench.arms import OFF, ON, SINGLE, ArmResult, Comparison, differing_share
from longtail.bench.card import Spread, Table, numbers, ratios
from longtail.system.device import threads_each

_LATER = 4
"""Fewest steps of a run whose later half is shown, too: drafters learn."""
_TELLING = 3
"""Fewest steps from which a gain is concluded: first steps are disturbed most."""
_NOTHING = 0.02
"""Fraction of a step's time within which a difference is none."""
_PARTS = ("rollout", "reward", "learn", "publish", "drafter")
"""Named parts of a step, which follow one another."""
_IDLE_WORK = ("learning_ahead_s", "spot_stop_latency_s")


def sentences(found: Mapping[str, ArmResult]) -> list[str]:
    """Return what a user would gain, and whether completions differ from those of the arm off."""
    own, plain = (found[arm].column("timing_s/step") for arm in (ON, best_plain(found)))
    half = len(own) // 2
    later = (
        f"; in the last {len(own) - half} steps {_verdict(own[half:], plain[half:])}"
        if len(own) >= _LATER
        else ""
    )
    differing = differing_share(found[OFF], found[ON])
    return [
        f"With drafts a step of this run took {_verdict(own, plain)}{later}.",
        f"NOTE: {differing:.2%} of the completions differ, so the arms did not make the same run."
        if differing
        else "All arms wrote the same completions.",
    ]


def _verdict(own: list[float], plain: list[float]) -> str:
    """Return the time relative to plain decoding, and if it is a gain beyond noise."""
    share = ratios(own, plain).median
    known = "no gain" if share <= 1.0 + _NOTHING else "a loss"
    if share < 1.0 - _NOTHING:
        known = "a gain"
    return f"{share:.2f}x of the time: {known if len(own) >= _TELLING else 'too few steps to tell'}"


def best_plain(found: Mapping[str, ArmResult]) -> str:
    """Return the arm that decodes plainly and took the least time in all steps."""
    plain = [name for name in (OFF, SINGLE) if name in found]
    return min(plain, key=lambda name: sum(found[name].column("timing_s/step")))


def tables(compared: Comparison, found: Mapping[str, ArmResult]) -> list[Table]:
    """Return the comparison, and the parts of a step."""
    own, best = compared.arms[OFF], best_plain(found)
    workers = own.cluster.workers
    arms = [
        (
            name,
            _speedup(found[best], each, "step"),
            _speedup(found[best], each, "rollout"),
            _median(each, "speculation/accept_length") or None,
            f"{_idle_share(each):.0%}",
            f"{_median(each, 'cluster/idle_utilization'):.0%}",
            f"{differing_share(found[OFF], each):.2%}",
        )
        for name, each in found.items()
    ]
    parts = [
        (
            name,
            *(f"{_median(result, f'timing_s/{part}'):.2f}" for part in (*_PARTS, "step")),
            *(f"{_median(result, f'cluster/{each}'):.2f}" for each in _IDLE_WORK),
            f"{_unnamed_share(result):.1%}",
        )
        for name, result in found.items()
    ]
    return [
        Table(
            f"Training {own.model.path} end to end, {workers} worker{'s' * (workers > 1)}, "
            f"{threads_each(own.run.threads, workers)} thread(s) each, {compared.steps} steps in "
            f"turn; speedups over the arm {best}; median (lowest-highest) over steps",
            (
                "arm",
                "step speedup",
                "rollout speedup",
                "accept length",
                "idle",
                "idle time used",
                "completions differ",
            ),
            arms,
        ),
        Table(
            "Seconds of a step, medians",
            ("arm", *_PARTS, "step", "ahead", "stop", "unnamed"),
            parts,
        ),
    ]


def as_json(compared: Comparison, found: Mapping[str, ArmResult]) -> dict[str, Any]:
    """Return every figure."""
    own, off, on, best = compared.arms[OFF], found[OFF], found[ON], best_plain(found)

    def columns(metric: str) -> dict[str, list[float]]:
        return {name: each.column(metric) for name, each in found.items()}

    return {
        "bench": "e2e",
        "model": own.model.path,
        "workers": own.cluster.workers,
        "steps": compared.steps,
        "over": best,
        **{
            f"{part}_speedup": numbers({ON: _speedup(found[best], on, part)})
            for part in ("step", "rollout")
        },
        "differing_share": {ON: differing_share(off, on)},
        "rewards_agree": on.column("reward/mean") == off.column("reward/mean"),
        "policies_agree": on.policy == off.policy,
        "idle_utilization": {ON: _median(on, "cluster/idle_utilization")},
        **{name: columns(f"cluster/{name}") for name in _IDLE_WORK},
        "unnamed_share": {name: _unnamed_share(each) for name, each in found.items()},
        "accept_length": columns("speculation/accept_length"),
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
    return Spread.of(result.column(name)).median


def _unnamed_share(result: ArmResult) -> float:
    """Return the fraction of all steps' seconds that are in none of their parts."""
    named = sum(sum(result.column(f"timing_s/{part}")) for part in _PARTS)
    whole = sum(result.column("timing_s/step"))
    return 1.0 - named / whole if whole else 0.0


def _idle_share(result: ArmResult) -> float:
    """Return the workers' idle fraction; work of idle workers counts as idle time."""
    works = ("spot", "learning_ahead")
    names = ("generating", "idle", *works, "learning")
    sums = {name: sum(result.column(f"cluster/{name}_s")) for name in names}
    total = sum(sums.values())
    return sum(sums[n] for n in ("idle", *works)) / total if total else 0.0
