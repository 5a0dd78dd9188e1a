"""`longtail bench rollout`: the speedup of speculation with fixed strategies.

The same prompts and noise keys with and without every drafter, coupled and not, with several
numbers of running requests, in turns; every text is compared. Three models:

With --model it is a model of the user's own, with its prompts, history and a given drafter.

    tiny   the tiny reasoner after its warm start
    100m   the same function in a shape of 100M parameters (`bench.common.grown`): its speed is that
           of the large shape, its text and acceptance are those of the small one
    text   a model of ordinary text, the sources of Python's library (`bench.common.textmodel`)
"""

from longtail.bench.common.process import pin, progress
from longtail.bench.rollout.options import DTYPES, RolloutBenchOptions


def run(options: RolloutBenchOptions) -> int:
    """Measure, print the card, and end with one JSON line."""
    cpus = pin(options.threads)
    from longtail.bench.common.card import print_card
    from longtail.bench.common.timing import pin_threads
    from longtail.bench.rollout import card
    from longtail.bench.rollout.coupling import coupling, length_decay
    from longtail.bench.rollout.measure import Cell
    from longtail.bench.rollout.subjects import GROUP, chosen_subject

    pin_threads(options.threads)
    log = progress("rollout")
    results = card.RolloutResults()
    for name in options.model_names:
        subject = chosen_subject(name, options, log)
        for running in options.running:
            cell = Cell(subject, running)
            results.cells.append(cell.measure(options.tokens_of(name), options.repeats, log))
        if name in DTYPES and name != "100m":  # its texts are those of `tiny`
            log(f"{name}: with and without shared noise")
            results.couplings[name] = coupling(subject, subject.prompts[::GROUP])
    if not options.quick and options.model is None:
        results.decay = length_decay(options.dtype_of("tiny"), log)
    tables, result = card.tables(options, cpus, results), card.as_json(options, cpus, results)
    print_card(tables, result, json_only=options.json)
    return 0
