"""`longtail bench e2e`: whole training runs that differ in how they draft, arm against arm.

With RUN the arms have the configuration of a user's own run; without it several workers on this
machine train the tiny reasoner, with one thread each. See `e2e.plan` for the arms.
"""

import tempfile
from pathlib import Path

from longtail.bench.common.process import progress
from longtail.bench.e2e.options import E2eBenchOptions


def run(options: E2eBenchOptions) -> int:
    """Measure, print the card, and end with one JSON line."""
    from longtail.bench.common.card import print_card
    from longtail.bench.e2e import beside, card
    from longtail.bench.e2e.arms import ACCEPT, OFF
    from longtail.bench.e2e.measure import measure
    from longtail.bench.e2e.plot import draw_curves
    from longtail.report.timeline_plot import draw

    with tempfile.TemporaryDirectory(prefix="longtail-e2e-") as place:
        log = progress("e2e")
        measured = measure(options, Path(place), log)
        off, python = measured.plan.arms[OFF], options.peer_python
        trl = beside.measure(python, off, measured.arms[OFF]) if python else None
    setting, found, room = measured.plan.setting, measured.arms, measured.room
    print_card(
        card.tables(setting, found),
        card.as_json(setting, found)
        | {
            "trl_ratio": trl.ratio.numbers() if trl else None,
            "parked": room.is_parked,
            "memory_bytes": room.needed,
        },
        sentences=[
            *card.sentences(found),
            *([trl.sentence()] if trl else []),
            *measured.plan.notes,
            room.sentence(),
        ],
        json_only=options.json,
    )
    if options.plot is not None:
        labels = {"off": "Without drafting", "spot": "With longtail"}
        pictured = [(labels[name], found[name].timeline) for name in labels if name in found]
        draw([(name, line) for name, line in pictured if line is not None], Path(options.plot))
    if options.curves is not None:
        curves = {name: each.column(ACCEPT) for name, each in found.items()}
        draw_curves(curves, Path(options.curves), switch_step=options.switch_task)
    return 0
