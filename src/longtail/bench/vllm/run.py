"""`longtail bench vllm`: drafters of longtail in vLLM, in the interpreter of its environment.

export   an exported drafter's accept length in vLLM against that in this engine, greedily
rules    the same drafter under several rules of drafting, with a temperature
live     a better drafter adopted in mid-run
"""

from argparse import Namespace
from dataclasses import asdict
from typing import Any

from longtail.bench.common.card import Table, print_card
from longtail.bench.common.process import pin, pinned, progress
from longtail.bench.common.timing import pin_threads
from longtail.bench.vllm import card
from longtail.bench.vllm.export import ExportBench
from longtail.bench.vllm.live import measure_live
from longtail.bench.vllm.options import VllmBenchOptions
from longtail.bench.vllm.rules import measure_rules
from longtail.bench.vllm.subject import open_subject
from longtail.programs.drafter_prompts import open_target, require_prompts


def run(options: VllmBenchOptions) -> int:
    """Compare, print the card, and end with one JSON line; return 1 if a promise is broken."""
    cpus = pin(1)
    pin_threads(1)
    log = progress("vllm")
    asked = {**asdict(options), "drafter": options.drafters[0], "seed": 0}
    words = Namespace(**asked | {"dtype": "float32"})
    target = open_target(words)
    prompts = require_prompts(words, target).tokens
    tables: list[Table] = []
    result: dict[str, Any] = card.settings(options, len(prompts))
    kept = True
    if "export" in options.parts:
        bench = ExportBench(options, target, prompts)
        found = [each for name in options.drafters for each in bench.compare(name)]
        tables.append(bench.table(found))
        result["compared"] = [{**asdict(each), "ratio": each.ratio} for each in found]
        kept = bench.agree(found)
    if {"rules", "live"} & set(options.parts):
        with open_subject(options, target, prompts, log) as subject:
            if "rules" in options.parts:
                rules = measure_rules(subject, options, log)
                tables.append(card.rules_table(rules, subject, options, pinned(cpus)))
                result |= card.rules_json(rules)
                kept &= card.is_equal(rules.differing_share, options)
            if "live" in options.parts:
                live = measure_live(subject, options, log)
                tables.append(card.live_table(live, options))
                result |= card.live_json(live)
                kept &= card.is_equal(live.differing_share, options)
    print_card(tables, result, json_only=options.json)
    return 0 if kept else 1
