"""`longtail bench tuner`: what the adaptive engine is worth against every fixed strategy.

The tiny reasoner with its eagle1 drafter, good, mediocre (30 % of its tokens are spoiled) and
adversarial (all of them are; it is as sure of itself, and as slow). Contestants, in turns:

    off        plain decoding
    chain N    one strategy all along; where few run, trees too
    beg-mab    the bandit of TLT, as the paper has it
    budget     the default: draft what pays, guarded

First at fixed numbers of running requests, then over a whole rollout with its long tail, where an
`oracle` plays what was best at each number. What needs torch is imported when the measuring starts.
"""

import argparse
import sys
from pathlib import Path

from longtail.bench.engine.run import pin
from longtail.bench.tuner.options import add_arguments, read_setting

__all__ = ["add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    """Measure, print the card, and end with one JSON line."""
    setting = read_setting(args)
    cpus = pin(setting.cells.threads)
    from longtail.bench.common.report import finish, pin_threads, show
    from longtail.bench.rollout.subjects import make_subject
    from longtail.bench.tuner import card
    from longtail.bench.tuner.measure import sweep
    from longtail.bench.tuner.rollout import measure_rollouts
    from longtail.report.rollout_plot import draw

    pin_threads(setting.cells.threads)
    subject = make_subject("tiny", setting.cells, _say)
    points = sweep(subject, setting, _say) if setting.sweeps else []
    rollouts = measure_rollouts(subject, setting, points, _say) if setting.rolls else None
    tables: list[tuple[str, tuple[str, ...], list[list[str]]]] = []
    if points:
        title = card.sweep_title(setting, cpus)
        tables.append((title, card.SWEEP_COLUMNS, card.sweep_rows(points)))
    if rollouts is not None:
        title = card.rollout_title(setting, rollouts)
        tables.append((title, card.ROLLOUT_COLUMNS, card.rollout_rows(rollouts)))
    *others, last = tables
    for table in others if not args.json else []:
        show(*table)
    finish(*last, card.as_json(points, rollouts, setting, cpus), json_only=args.json)
    if setting.plot is not None and rollouts is not None:
        draw(rollouts.series, Path(setting.plot))
    return 0


def _say(text: str) -> None:
    print(f"bench tuner: {text}", file=sys.stderr, flush=True)
