"""`longtail bench rollout`: what speculation is worth, with fixed strategies.

The same prompts and keys without and with every drafter, coupled and not, at several numbers of
running requests, in turns; every text is compared. Three models:

    tiny   the quickstart's reasoner, as it is warm-started
    100m   the same function in a shape of 100M parameters (`bench.common.grown`): its speed is the
    large
           shape's, its text and acceptance are the small one's
    text   a model of ordinary text, the sources of Python's library (`bench.common.textmodel`)

What needs torch is imported when the measuring starts.
"""

import argparse
import sys
from typing import TYPE_CHECKING, Any

from longtail.bench.engine.run import pin
from longtail.bench.rollout.options import add_arguments, read_setting

if TYPE_CHECKING:
    from longtail.bench.rollout.measure import CellResult

__all__ = ["add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    """Measure, print the card, and end with one JSON line."""
    setting = read_setting(args)
    cpus = pin(setting.threads)
    from longtail.bench.common.report import finish, pin_threads
    from longtail.bench.rollout import card as rollout_card
    from longtail.bench.rollout.coupling import coupling
    from longtail.bench.rollout.measure import Cell
    from longtail.bench.rollout.subjects import GROUP, length_decay, make_subject

    pin_threads(setting.threads)
    cells: list[CellResult] = []
    couplings: dict[str, Any] = {}
    for name in setting.models:
        subject = make_subject(name, setting, _say)
        for running in setting.running:
            cells.append(
                Cell(subject, running).measure(setting.tokens_of(name), setting.repeats, _say)
            )
        if name != "100m":  # its texts are those of `tiny`
            _say(f"{name}: with and without the noise")
            couplings[name] = coupling(subject, subject.prompts[::GROUP])
    decay = length_decay(setting, _say) if setting.length else None
    finish(
        rollout_card.title(setting, cpus),
        rollout_card.COLUMNS,
        [line for cell in cells for line in rollout_card.rows(cell)]
        + rollout_card.coupling_rows(couplings)
        + rollout_card.decay_rows(decay),
        rollout_card.as_json(cells, couplings, decay, setting, cpus),
        json_only=args.json,
    )
    return 0


def _say(text: str) -> None:
    print(f"bench rollout: {text}", file=sys.stderr, flush=True)
