"""`longtail bench e2e`: whole training runs that differ in how they draft and idle, arm by arm.

All arms take turns, a step each, so a slow minute of the machine falls on all of them alike, and
ratios are taken step by step:

    step 1    off  frozen  spot  all        each: unpark, STEP, park
    step 2    all  spot  frozen  off        only STEP is timed

If the arms may need more memory together than there is, each is parked on disk between its steps:
the weights and moments of its learner, and its KV cache is freed.
"""

import tempfile
from pathlib import Path

from longtail.assembly import memory
from longtail.assembly.device import run_device
from longtail.assembly.engine import model_directory
from longtail.assembly.plan import plan_run
from longtail.bench.common.card import print_card
from longtail.bench.common.timing import Log, progress
from longtail.bench.e2e import card
from longtail.bench.e2e.arms import ALL, COLD, OFF, SPOT, Arm, ArmResult, Plan, make_plan
from longtail.bench.options import E2eBenchOptions
from longtail.view import timeline_plot


def run(options: E2eBenchOptions) -> int:
    """Measure, print the card, and end with one JSON line."""
    log = progress("e2e")
    with tempfile.TemporaryDirectory(prefix="longtail-e2e-") as place:
        plan = make_plan(options, Path(place))
        for note in plan.notes:
            log(note)
        parks = must_park(plan)
        found = run_arms(plan, log, is_parked=parks)
    memory = ["arms were parked on disk between their steps"] if parks else []
    print_card(
        card.tables(plan, found),
        card.as_json(plan, found) | {"parked": parks},
        sentences=[*card.sentences(found), *plan.notes, *memory],
        json_only=options.json,
    )
    if options.plot is not None:
        draw(found, Path(options.plot))
    return 0


def must_park(plan: Plan) -> bool:
    """Return whether all arms together may need more memory than is free."""
    own = plan.arms[OFF]
    directory, available = model_directory(own.model.path), memory.available_bytes(run_device(own))
    plans = [memory.fitted(plan_run(each, directory)) for each in plan.arms.values()]
    parts = [(each.config.cluster.workers, memory.estimate(each)) for each in plans]
    passing = [n * sum(part.get(name, 0) for name in memory.PASSING) for n, part in parts]
    needed = sum(n * sum(part.values()) for n, part in parts) - sum(passing) + max(passing)
    return available is not None and needed > available and not own.is_sharded


def run_arms(plan: Plan, log: Log, *, is_parked: bool) -> dict[str, ArmResult]:
    """Train all arms in turn; parked ones have their memory during their own step only."""
    arms: list[Arm] = []
    try:
        for name, own in plan.arms.items():
            arms.append(Arm(name, own))
            if is_parked:
                arms[-1].park()
        for step in range(1, plan.steps + 1):
            seconds = []
            for arm in arms if step % 2 else arms[::-1]:  # forward, then backward
                if is_parked:
                    arm.unpark()
                metrics = arm.step()
                if step == plan.steps:
                    arm.finish()
                if is_parked:
                    arm.park()
                seconds.append(f"{arm.name} {metrics['timing_s/step']:.1f} s")
            log(f"step {step}/{plan.steps}: {', '.join(sorted(seconds))}")
    finally:
        found = {arm.name: arm.close() for arm in arms}
    return found


def draw(found: dict[str, ArmResult], path: Path) -> None:
    """Draw the workers in the last step, in the arm off and in the one that does most."""
    most = [name for name in (ALL, SPOT, COLD) if name in found][:1]
    labels = zip(("Without drafting", "With longtail"), (OFF, *most), strict=False)
    pictured = [(label, found[name].timeline) for label, name in labels]
    timeline_plot.draw([(name, line) for name, line in pictured if line is not None], path)
