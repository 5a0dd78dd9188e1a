"""`longtail bench engine`: this engine against other engines and against a lower bound.

The models have random weights and short prompts, or it is a user's own with prompts cut to one
length. Contestants: this engine; `transformers` generate; vLLM's CPU build, where `--vllm-python`
names an environment that has it; and a bare loop over the same matrix products. They run in turns
on the same pinned CPUs.
"""

from longtail.bench.common.process import pin, progress
from longtail.bench.engine.options import EngineBenchOptions


def run(options: EngineBenchOptions) -> int:
    """Measure, print the card, and end with one JSON line."""
    cpus = pin(options.threads)
    from longtail.bench.common.card import print_card
    from longtail.bench.common.timing import pin_threads
    from longtail.bench.engine import card
    from longtail.bench.engine.measure import CellResult, measure_model

    pin_threads(options.threads)
    cells: list[CellResult] = []
    contestants: dict[str, str] = {}
    for name in options.model_names:
        cells += measure_model(name, options, progress("engine"), contestants)
    tables = [card.table(options, cpus, cells)]
    result = card.as_json(options, cpus, cells, contestants)
    print_card(tables, result, json_only=options.json)
    return 0
