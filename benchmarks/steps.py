"""Seconds of plain engine steps of a number of rows, beside the least that the machine admits.

Every completion runs and no prompt is read, so neither the tail of a rollout nor its start counts.
Models and numbers of rows take turns. The limit is that of `longtail doctor MODEL`: reading the
weights once, or the products of all rows, without keys and values and without sampling; it is
measured before each cell.
"""

from script import Batches, Json, Repeats, Threads, pin, pinned, start

# isort: split

import sys
import time
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any, Literal

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass

from longtail.assembly.engine import open_model
from longtail.bench.card import Spread, Table, print_card, progress
from longtail.engine.engine import RolloutEngine
from longtail.engine.request import EngineLimits
from longtail.model.hf.tokenizer import load_tokenizer
from longtail.model.roofline import limit_of, measure
from longtail.model.transformer import Transformer
from longtail.run.base_model import model_directory
from longtail.system.device import set_threads
from longtail.types import Request, SamplingParams

Dtype = Literal["float32", "bfloat16", "float64"]
_PROMPT, _WARM = 32, 3
"""Tokens of a prompt; steps before those that count."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Models and sizes of steps."""

    models: tuple[str, ...] = Field(
        ("smollm2",), description="directories, hub ids, GGUF files, or smollm2"
    )
    dtype: Dtype = Field("bfloat16", description="dtype of the weights")
    rows: Batches = (1, 4, 8, 16, 32, 64)
    steps: int = Field(12, ge=1, description="measured steps of a turn")
    repeats: Repeats = 3
    threads: Threads = 1
    json: Json = False


def run(options: Options) -> int:
    """Measure, print the card, and end with one JSON line."""
    cpus = pin(options.threads)
    set_threads(options.threads)
    log = progress("steps")
    opened = [_open(name, options.dtype) for name in options.models]
    took: dict[tuple[str, int], list[float]] = {}
    least: dict[tuple[str, int], list[float]] = {}
    for turn in range(options.repeats):
        for name, model in zip(options.models, opened, strict=True):
            for rows in options.rows:
                limit = limit_of(model.config, model.dtype, measure(model.device, model.dtype))
                seconds = list(steady(model, rows, options.steps))
                took.setdefault((name, rows), []).append(median(seconds))
                least.setdefault((name, rows), []).append(limit.seconds(rows))
            log(f"turn {turn + 1} of {options.repeats}: {name}")
    cells = [_cell(name, rows, took[name, rows], least[name, rows]) for name, rows in took]
    title = f"Plain steps in {options.dtype}, {options.threads} thread(s), {pinned(cpus)}"
    headings = ("model, rows", "ms", "tokens/s", "least ms", "of the limit")
    lines = [
        (
            f"{each['model']}, {each['rows']}",
            Spread(**each["ms"]),
            f"{1000 * each['rows'] / each['ms']['median']:,.0f}",
            Spread(**each["least_ms"]),
            Spread(**each["limit_share"]),
        )
        for each in cells
    ]
    settings = {"dtype": options.dtype, "steps": options.steps, "repeats": options.repeats}
    result = {"bench": "steps", **settings, "threads": options.threads, "cells": cells}
    print_card([Table(title, headings, lines)], result, json_only=options.json)
    return 0


def _open(name: str, dtype: str) -> Transformer:
    directory = model_directory(name)
    return open_model(name, directory, load_tokenizer(directory), dtype).model


def _cell(name: str, rows: int, took: Sequence[float], least: Sequence[float]) -> dict[str, Any]:
    shares = [limit / seconds for limit, seconds in zip(least, took, strict=True)]
    return {
        "model": name,
        "rows": rows,
        "ms": Spread.of([1000 * each for each in took]).numbers(),
        "least_ms": Spread.of([1000 * each for each in least]).numbers(),
        "limit_share": Spread.of(shares).numbers(),
    }


def steady(model: Transformer, rows: int, steps: int) -> Iterator[float]:
    """Yield the seconds of steps in which `rows` completions run and no prompt is read."""
    limits = EngineLimits.of(rows, _PROMPT + 2 * (_WARM + steps))
    engine = RolloutEngine(model, lambda _tokens: "", limits)
    sampling = SamplingParams(max_tokens=2 * (_WARM + steps))
    prompts = torch.randint(model.config.vocab_size, (rows, _PROMPT)).tolist()
    for index, prompt in enumerate(prompts):
        engine.submit(
            Request(
                request_id=str(index), prompt_tokens=tuple(prompt), noise_key=index,
                sampling=sampling,
            )
        )  # fmt: skip
    decoded = 0
    while decoded < _WARM + steps:
        began = time.perf_counter()
        report = engine.step()
        took = time.perf_counter() - began
        if report.num_tokens == len(report.emitted) == rows:
            decoded += 1
            if decoded > _WARM:
                yield took


if __name__ == "__main__":
    sys.exit(start(Options, run))
