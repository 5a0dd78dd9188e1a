"""The measurement of `longtail bench e2e`: all arms take turns, a step each, in one run.

    step 1    off  history  frozen  spot  cold        each: unpark, STEP, park
    step 2    cold  spot  frozen  history  off        only STEP is timed

A slow minute of the machine therefore falls on all arms alike, and ratios are taken step by step.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from longtail.assembly import memory
from longtail.bench.common.process import Log
from longtail.bench.e2e import beside
from longtail.bench.e2e.arms import OFF, Arm, ArmResult
from longtail.bench.e2e.options import E2eBenchOptions
from longtail.bench.e2e.plan import Plan, make_plan
from longtail.bench.e2e.room import Room, check_disk, room_for
from longtail.system.device import choose_device


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Figures of all arms, and how they were measured."""

    plan: Plan
    room: Room
    arms: Mapping[str, ArmResult]


def measure(options: E2eBenchOptions, place: Path, log: Log, *overrides: str) -> Measured:
    """Train all arms in turn, a step each; `overrides` add to the configuration of all."""
    plan = make_plan(options, place, overrides)
    if options.peer_python is not None:
        log("loading TRL, to see that it starts")
        beside.open_trl(options.peer_python, plan.arms[OFF]).close()
    for note in plan.notes:
        log(note)
    room = find_room(plan, place, options.memory)
    log(room.sentence())
    return Measured(plan=plan, room=room, arms=run_arms(plan, log, is_parked=room.is_parked))


def find_room(plan: Plan, place: Path, given_gb: float | None = None) -> Room:
    """Estimate the memory of all arms. Raises ConfigError if they exceed what is given or free."""
    own = next(iter(plan.arms.values()))
    device, shape = choose_device(own.run.device), memory.model_shape(own.model.path)
    available = memory.available_bytes(device) if given_gb is None else int(given_gb * 1e9)
    room = room_for(plan.arms, shape, available, on_cpu=device.type == "cpu")
    if room.is_parked:
        check_disk(plan.arms, shape, place)
    return room


def run_arms(plan: Plan, log: Log, *, is_parked: bool) -> dict[str, ArmResult]:
    """Train all arms in turn; parked ones have their memory during their own step only."""
    arms: list[Arm] = []
    try:
        for name, own in plan.arms.items():
            arms.append(Arm(name, own))
            if is_parked:
                arms[-1].park()
        for step in range(1, plan.setting.steps + 1):
            seconds = []
            for arm in arms if step % 2 else arms[::-1]:  # forward, then backward
                if is_parked:
                    arm.unpark()
                metrics = arm.step()
                if step == plan.setting.steps:
                    arm.finish(times_saves=plan.times_saves)
                if is_parked:
                    arm.park()
                seconds.append(f"{arm.name} {metrics['timing_s/step']:.1f} s")
            log(f"step {step}/{plan.setting.steps}: {', '.join(sorted(seconds))}")
    finally:
        found = {arm.name: arm.close() for arm in arms}
    return found
