"""`longtail bench e2e`: whole training runs that differ in how they draft, arm against arm.

Several workers on this machine train the tiny reasoner, with one thread each; see `e2e.measure` for
the arms.
"""

import tempfile
from pathlib import Path

from longtail.bench.common.process import progress
from longtail.bench.e2e.options import E2eBenchOptions


def run(options: E2eBenchOptions) -> int:
    """Measure, print the card, and end with one JSON line."""
    from longtail.bench.common.card import print_card
    from longtail.bench.e2e import card
    from longtail.bench.e2e.measure import ACCEPT, measure
    from longtail.bench.e2e.plot import draw_curves
    from longtail.report.timeline_plot import draw

    with tempfile.TemporaryDirectory(prefix="longtail-e2e-") as place:
        found = measure(options, Path(place), progress("e2e"))
    result = card.as_json(options, found)
    print_card(card.tables(options, found), result, json_only=options.json)
    if options.plot is not None:
        pictured = [(name, found[name].timeline) for name in ("off", "spot") if name in found]
        draw([(name, line) for name, line in pictured if line is not None], Path(options.plot))
    if options.curves is not None:
        curves = {name: each.column(ACCEPT) for name, each in found.items()}
        draw_curves(curves, Path(options.curves), switch_step=options.switch_task)
    return 0
