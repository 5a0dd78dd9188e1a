"""`longtail bench e2e`: compares whole training runs with drafting and without, step by step.

All arms take turns, a step each, so a slow minute of the machine falls on all of them alike, and
ratios are taken step by step:

    step 1    off  single  on
    step 2    on  single  off

All are in memory from the first step to the last; arms that do not fit together are refused.
"""

import tempfile
from pathlib import Path

from longtail.assembly import memory_bound
from longtail.assembly.plan import limit_on, plan_run
from longtail.assembly.precision import run_device
from longtail.bench import e2e_card
from longtail.bench.arms import OFF, Arm, ArmResult, Comparison, make_comparison
from longtail.bench.card import Log, print_card, progress
from longtail.config.command_options import E2eBenchOptions
from longtail.errors import ConfigError
from longtail.run.base_model import model_directory


def run(options: E2eBenchOptions) -> int:
    """Measure, print the card, and end with one JSON line."""
    with tempfile.TemporaryDirectory(prefix="longtail-e2e-") as place:
        compared = make_comparison(options, Path(place))
        check_memory(compared)
        own = compared.arms[OFF]
        limit = limit_on(plan_run(own, model_directory(own.model.path)))
        limits = () if limit is None else (f"{limit.sentence(own.running)}.",)
        found = run_arms(compared, progress("e2e"))
    print_card(
        e2e_card.tables(compared, found),
        e2e_card.as_json(compared, found),
        sentences=[*e2e_card.sentences(found), *limits],
        json_only=options.json,
    )
    return 0


def check_memory(compared: Comparison) -> None:
    """Raise ConfigError if all arms together may need more memory than is free.

    What passes with a learner step is that of one arm at a time. No more requests run than a step
    has: nothing is evaluated.
    """
    own = compared.arms[OFF]
    directory = model_directory(own.model.path)
    available = memory_bound.available_bytes(run_device(own))
    requests = own.rollout.prompts_per_step * own.rollout.group_size
    parts = []
    for arm in compared.arms.values():
        running = {"max_running": min(arm.rollout.max_running, requests)}
        rollout = arm.rollout.model_copy(update=running)
        plan = plan_run(arm.model_copy(update={"rollout": rollout}), directory)
        parts.append((arm.cluster.workers, memory_bound.estimate(memory_bound.fitted(plan))))
    passing = [n * sum(part.get(name, 0) for name in memory_bound.PASSING) for n, part in parts]
    needed = sum(n * sum(part.values()) for n, part in parts) - sum(passing) + max(passing)
    if available is not None and needed > available:
        raise ConfigError(
            f"the arms {', '.join(compared.arms)} need up to {needed / 1e9:.1f} GB of memory "
            f"together, and {available / 1e9:.1f} GB are free: lower rollout.max_running, "
            "learner.tokens_per_micro_batch or cluster.workers (on a GPU "
            "rollout.vllm.gpu_memory_utilization)"
        )


def run_arms(compared: Comparison, log: Log) -> dict[str, ArmResult]:
    """Train all arms in turn, a step each."""
    arms: list[Arm] = []
    try:
        for name, own in compared.arms.items():
            arms.append(Arm(name, own))
        for step in range(1, compared.steps + 1):
            seconds = []
            for arm in arms if step % 2 else arms[::-1]:  # forward, then backward
                metrics = arm.step()
                seconds.append(f"{arm.name} {metrics['timing_s/step']:.1f} s")
            log(f"step {step}/{compared.steps}: {', '.join(sorted(seconds))}")
        for arm in arms:
            arm.finish()
    finally:
        found = {arm.name: arm.close() for arm in arms}
    return found
