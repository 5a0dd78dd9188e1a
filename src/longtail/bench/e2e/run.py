"""`longtail bench e2e`: what spot training makes of a whole training run, arm against arm.

Several workers on this machine train the tiny reasoner, with one thread each; see `e2e_arms` for
who takes part. What needs torch is imported when the measuring starts.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from longtail.bench.e2e.options import add_arguments, read_setting

__all__ = ["add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    """Measure, print the card, and end with one JSON line."""
    setting = read_setting(args)
    from longtail.bench.common.report import finish, show
    from longtail.bench.e2e import card
    from longtail.bench.e2e.arms import ACCEPT, measure
    from longtail.bench.e2e.plot import draw_curves
    from longtail.report.timeline_plot import draw

    with tempfile.TemporaryDirectory(prefix="longtail-e2e-") as place:
        found = measure(setting, Path(place), _say)
    tables = card.tables(setting, found)
    for table in tables[:-1] if not args.json else []:
        show(*table)
    finish(*tables[-1], card.as_json(setting, found), json_only=args.json)
    if args.plot is not None:
        pictured = [(name, found[name].timeline) for name in ("off", "spot") if name in found]
        draw([(name, line) for name, line in pictured if line is not None], Path(args.plot))
    if args.curves is not None:
        curves = {name: each.column(ACCEPT) for name, each in found.items()}
        draw_curves(curves, Path(args.curves), switch_step=setting.switch_step)
    return 0


def _say(text: str) -> None:
    print(f"bench e2e: {text}", file=sys.stderr, flush=True)
