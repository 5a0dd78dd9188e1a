"""`longtail bench recipes`: how soon a fresh drafter is accepted, by its recipe.

The target completes prompts once. Then each recipe trains a fresh drafter on these texts, each text
once, in the same order. The expected accept length on held-out prompts is a function of the trained
tokens, so a busy machine changes no figure but the seconds.
"""

from typing import Any

from longtail.bench.common.process import pin, pinned, progress
from longtail.bench.recipes.options import RecipesBenchOptions


def run(options: RecipesBenchOptions) -> int:
    """Measure, print the card, and end with one JSON line."""
    cpus = pin(options.threads)
    from longtail.bench.common.card import Table, by_position, print_card
    from longtail.bench.common.timing import pin_threads
    from longtail.bench.recipes.candidates import candidate
    from longtail.bench.recipes.measure import collect, curve

    pin_threads(options.threads)
    log = progress("recipes")
    corpus = collect(options, log)
    rows: list[tuple[Any, ...]] = []
    result: dict[str, Any] = {}
    for name in options.recipes:
        one = candidate(name, corpus.target.config)
        points = curve(one, corpus, options)
        lengths = [f"{point.accept_len:.2f}" for point in points]
        missing = [""] * (len(options.points) - len(points))
        rows.append((one.about, *lengths, *missing))
        result[name] = {
            "num_tokens": [point.num_tokens for point in points],
            "accept_length": [round(point.accept_len, 4) for point in points],
            "overlap": [[round(each, 4) for each in point.overlap] for point in points],
            "seconds": [round(point.seconds, 2) for point in points],
        }
        log(f"{one.about}: {' '.join(lengths)}")
    title = (
        f"Expected accept length by trained tokens: {options.model}, {options.prompts}, "
        f"{len(corpus.heldout)} held-out texts, {pinned(cpus)}"
    )
    headings = ("fresh drafter", *(f"{points:,}" for points in options.points))
    print_card(
        [Table(title, by_position(*headings), rows)],
        {
            "bench": "recipes",
            "model": options.model,
            "prompts": options.prompts,
            "num_trainable": corpus.num_trainable,
            "recipes": result,
        },
        json_only=options.json,
    )
    return 0
