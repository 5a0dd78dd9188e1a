"""`longtail bench engine`: this engine against its rivals and against the floor.

Contestants: this engine; `transformers` generate; vLLM's CPU build, where `--vllm-python` names an
environment that has it; and a bare loop over the same matrix products, the floor. They run in turns
in each cell (`engine_cells`). What needs torch is imported when the measuring starts.
"""

import argparse
import os
import sys
from typing import TYPE_CHECKING

from longtail.bench.engine.options import add_arguments, read_setting

if TYPE_CHECKING:
    from longtail.bench.engine.measure import CellResult

__all__ = ["add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    """Measure, print the card, and end with one JSON line."""
    setting = read_setting(args)
    cpus = pin(setting.threads)
    from longtail.bench.common.report import finish, pin_threads
    from longtail.bench.engine import card as engine_card
    from longtail.bench.engine.measure import measure_model

    pin_threads(setting.threads)
    results: list[CellResult] = []
    contestants: dict[str, str] = {}
    for name in setting.models:
        measured = measure_model(name, setting, _say)
        results += measured.cells
        contestants |= measured.peers
    finish(
        engine_card.title(setting, cpus),
        engine_card.COLUMNS,
        [line for cell in results for line in engine_card.rows(cell)],
        engine_card.as_json(results, setting, cpus, contestants),
        json_only=args.json,
    )
    return 0


def pin(threads: int) -> list[int]:
    """Keep this process and its children on the last `threads` CPUs it may use, where it can.

    To choose others, start the bench under `taskset`.
    """
    if sys.platform != "linux":
        return []
    cpus = sorted(os.sched_getaffinity(0))[-threads:]
    os.sched_setaffinity(0, cpus)
    return cpus


def _say(text: str) -> None:
    print(f"bench engine: {text}", file=sys.stderr, flush=True)
