"""The card of `longtail bench e2e`."""

from collections.abc import Mapping
from typing import Any

from longtail.bench.arms import (
    ACCEPT,
    ALL,
    COLD,
    OFF,
    SINGLE,
    SPOT,
    ArmResult,
    Comparison,
    differing_share,
)
from longtail.bench.card import Spread, Table, numbers, ratios
from longtail.system.device import threads_each

_SHOWN_STEPS = 12
_LATER = 4
"""Fewest steps of a cold run whose later half is shown, too."""
_TELLING = 3
"""Fewest steps from which a gain is concluded: first steps are disturbed most."""
_NOTHING = 0.02
"""Share of a step's time within which a difference is none."""
_PARTS = ("rollout", "reward", "learn", "publish", "drafter")
"""Named parts of a step, which follow one another."""
_IDLE_WORK = ("learning_ahead_s", "spot_stop_latency_s")


def sentences(found: Mapping[str, ArmResult]) -> list[str]:
    """Return what a user would gain, and whether the texts of the arms differ."""
    off, drafting = found[OFF], _drafting(found)
    differing = max((differing_share(off, each) for each in drafting.values()), default=0.0)
    texts = (
        f"NOTE: up to {differing:.2%} of the texts differ from those of the arm off, so the arms "
        "did not make the same run."
        if differing
        else "All arms wrote the same texts."
    )
    return [*_gain(found[best_plain(found)], found), texts]


def best_plain(found: Mapping[str, ArmResult]) -> str:
    """Return the arm that decodes plainly and took the least time in all steps."""
    plain = [name for name in (OFF, SINGLE) if name in found]
    return min(plain, key=lambda name: sum(found[name].column("timing_s/step")))


def _drafting(found: Mapping[str, ArmResult]) -> dict[str, ArmResult]:
    return {name: each for name, each in found.items() if name not in (OFF, SINGLE)}


def _gain(off: ArmResult, found: Mapping[str, ArmResult]) -> list[str]:
    """Return the share of a step's time with all that longtail does, or with drafts alone."""
    begun = ((SPOT, "trained before"), (COLD, "fresh at its start"))
    told = ((ALL, "idle workers at work"),) if ALL in found else begun
    clauses: list[str] = []
    for name, what in told:
        if name not in found:
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


def tables(compared: Comparison, found: Mapping[str, ArmResult]) -> list[Table]:
    """Return the comparison, accept lengths, and the parts of a step."""
    off, own, best = found[OFF], compared.arms[OFF], best_plain(found)
    workers = own.cluster.workers
    arms = [
        (
            name,
            _speedup(found[best], each, "step"),
            _speedup(found[best], each, "rollout"),
            _median(each, ACCEPT) or None,
            f"{_idle_share(each):.0%}",
            f"{_median(each, 'cluster/idle_utilization'):.0%}",
            f"{differing_share(off, each):.2%}",
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
                "texts differ",
            ),
            arms,
        ),
        *_accept_table(found),
        Table(
            "Seconds of a step, medians",
            ("arm", *_PARTS, "step", "ahead", "stop", "unnamed"),
            parts,
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
            ("arm", *(str(step + 1) for step in steps)),
            cells,
        )
    ]


# ---- JSON


def as_json(compared: Comparison, found: Mapping[str, ArmResult]) -> dict[str, Any]:
    """Return every figure."""
    own, off, best = compared.arms[OFF], found[OFF], best_plain(found)
    others = _drafting(found)

    def columns(metric: str) -> dict[str, list[float]]:
        return {name: each.column(metric) for name, each in found.items()}

    def speedups(part: str) -> dict[str, dict[str, float]]:
        return numbers({name: _speedup(found[best], each, part) for name, each in others.items()})

    return {
        "bench": "e2e",
        "model": own.model.path,
        "workers": own.cluster.workers,
        "steps": compared.steps,
        "over": best,
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
        **{name: columns(f"cluster/{name}") for name in _IDLE_WORK},
        "unnamed_share": {name: _unnamed_share(each) for name, each in found.items()},
        "accept_length": columns(ACCEPT),
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
    """Return the share of all steps' seconds that are in none of their parts."""
    named = sum(sum(result.column(f"timing_s/{part}")) for part in _PARTS)
    whole = sum(result.column("timing_s/step"))
    return 1.0 - named / whole if whole else 0.0


def _idle_share(result: ArmResult) -> float:
    """Return the workers' idle share; work of idle workers counts as idle time."""
    works = ("spot", "learning_ahead")
    names = ("generating", "idle", *works, "learning")
    sums = {name: sum(result.column(f"cluster/{name}_s")) for name in names}
    total = sum(sums.values())
    return sum(sums[n] for n in ("idle", *works)) / total if total else 0.0
