"""`longtail bench tuner`: the adaptive engine against every fixed strategy.

The tiny reasoner with its eagle1 drafter, or the user's own model with a drafter: good, mediocre
(30 % of its tokens are wrong) and adversarial (all of them are wrong; its confidence and speed are
the same). Contestants, in turns:

    off        plain decoding
    chain N    one fixed strategy; with few running requests, trees too
    beg-mab    the bandit of TLT, as in the paper
    budget     the default: draft while it pays, with a guard

First with fixed numbers of running requests, then over a whole rollout with its long tail, where an
`oracle` uses the best strategy at each number.
"""

from pathlib import Path

from longtail.bench.common.process import pin, progress
from longtail.bench.tuner.options import RECIPE, TunerBenchOptions


def run(options: TunerBenchOptions) -> int:
    """Measure, print the card, and end with one JSON line."""
    cpus = pin(options.threads)
    from longtail.bench.common.card import print_card
    from longtail.bench.common.timing import pin_threads
    from longtail.bench.rollout.subjects import make_subject, own_subject
    from longtail.bench.tuner import card
    from longtail.bench.tuner.measure import sweep
    from longtail.bench.tuner.rollout import measure_rollouts
    from longtail.report.rollout_plot import draw

    pin_threads(options.threads)
    log = progress("tuner")
    dtype = options.dtype_name
    if options.model is None or options.prompts is None or options.drafter is None:
        subject = make_subject("tiny", dtype, (RECIPE,), log)
    else:
        drafters = {RECIPE: options.drafter}
        subject = own_subject(options.model, options.prompts, dtype, drafters, log)
    points = sweep(subject, options, log) if options.sweep else []
    rollouts = measure_rollouts(subject, options, points, log) if options.rollout else None
    tables = [card.sweep_table(options, cpus, points)] if points else []
    if rollouts is not None:
        tables.append(card.rollout_table(options, rollouts))
    result = card.as_json(options, cpus, points, rollouts)
    print_card(tables, result, json_only=options.json)
    if options.plot is not None and rollouts is not None:
        draw(rollouts.series, Path(options.plot))
    return 0
