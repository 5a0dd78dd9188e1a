"""The card of `longtail bench vllm`: rules of drafting, and the adoption of a drafter."""

from typing import Any

from longtail.bench.common.card import Table, by_position
from longtail.bench.vllm.live import Live
from longtail.bench.vllm.options import VllmBenchOptions
from longtail.bench.vllm.rules import DRAFTING, RULES, Rules
from longtail.bench.vllm.subject import Subject

_WORDS = {
    "plain": "plain, keyed noise",
    "coupled": "coupled, by equality",
    "greedy": "vLLM's default, greedy drafts",
    "probabilistic": "vLLM, sampled drafts",
}


def settings(options: VllmBenchOptions, num_prompts: int) -> dict[str, Any]:
    """Return the settings for JSON."""
    return {
        "bench": "vllm",
        "target": options.target,
        "depth": options.depth,
        "prompts": num_prompts,
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "dtype": options.dtype,
        "block_rows": options.block_rows,
        "max_running": options.max_running,
    }


def is_equal(share: float, options: VllmBenchOptions) -> bool:
    """Return whether texts are equal where that is promised.

    In bfloat16 vLLM's CPU products depend on the number of rows unless that is fixed.
    """
    return share == 0.0 or (options.dtype == "bfloat16" and not options.block_rows)


def rules_table(rules: Rules, subject: Subject, options: VllmBenchOptions, pinned: str) -> Table:
    """Return acceptance, speed and texts of each rule."""
    lengths, differing = rules.accept_length, rules.differing()
    rows = [
        (
            _WORDS[rule],
            f"{lengths[rule]:.3f}" if rule in lengths else None,
            rules.speed(rule).text(0),
            rules.throughput_ratio(rule).text() if rule != "plain" else None,
            f"{differing[rule]:.0%}" if rule in differing else None,
        )
        for rule in RULES
    ]
    blocks = f", blocks of {options.block_rows} rows" if options.block_rows else ""
    title = (
        f"{rules.engine}, {options.target} in {options.dtype}{blocks}, drafter {subject.name}, "
        f"chains of {options.depth}, temperature {options.temperature:g}, "
        f"{len(subject.prompts)} prompts, {options.max_running} running, one thread ({pinned})"
    )
    if rules.own_texts_share is not None:
        title += f"; longtail's engine writes {rules.own_texts_share:.0%} of the plain texts, too"
    headings = ("rule", "accept length", "tok/s", "tok/s, over plain", "texts not plain's")
    return Table(title, by_position(*headings), rows)


def rules_json(rules: Rules) -> dict[str, Any]:
    """Return the figures of all rules."""
    return {
        "engine": rules.engine,
        "accept_length": rules.accept_length,
        "differing_share": rules.differing_share,
        "differing_by_rule": rules.differing(),
        "throughput_ratio": {rule: rules.throughput_ratio(rule).numbers() for rule in DRAFTING},
        "tokens_per_s": {rule: rules.speed(rule).numbers() for rule in RULES},
        "own_texts_share": rules.own_texts_share,
    }


def live_table(live: Live, options: VllmBenchOptions) -> Table:
    """Return the accept length before, during and after the adoption."""
    title = (
        f"Adoption of {options.drafters[-1]} in place of {options.earlier or 'fresh weights'}: "
        f"{live.differing_share:.0%} of the texts change"
    )
    rows = [
        ("before", live.before.accept_length, live.before.tokens_per_s),
        ("adopted when half of the requests are done", live.during.accept_length,
         live.during.tokens_per_s),
        ("after", live.after.accept_length, live.after.tokens_per_s),
    ]  # fmt: skip
    cells = [(name, f"{length:.3f}", f"{speed:,.0f}") for name, length, speed in rows]
    return Table(title, by_position("turn", "accept length", "tok/s"), cells)


def live_json(live: Live) -> dict[str, Any]:
    """Return the figures of the adoption."""
    return {
        "adopted_gain": live.adopted_gain,
        "adopted_accept_length": {
            "before": live.before.accept_length,
            "during": live.during.accept_length,
            "after": live.after.accept_length,
        },
        "adopted_differing_share": live.differing_share,
    }
