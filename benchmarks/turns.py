"""Seconds to the first token of each turn of an episode, with the KV of earlier turns and without.

    python benchmarks/turns.py smollm2

An episode has a prompt of 400 tokens; between two turns of 30 tokens come observations of 20. Both
ways write the same tokens.
"""

from script import pin, pinned

# isort: split

import argparse
import time

import torch

from longtail.bench.card import Spread, Table, print_card, ratios
from longtail.engine.engine import RolloutEngine
from longtail.engine.request import EngineLimits
from longtail.model.hf.model import load_model
from longtail.run.base_model import model_directory
from longtail.system.device import set_threads
from longtail.types import Request, SamplingParams

PROMPT, TURN, OBSERVED, NUM_TURNS = 400, 30, 20, 5


def episode(engine: RolloutEngine, key: int, *, kept: bool) -> tuple[list[int], list[float]]:
    """Return the tokens of an episode, and the seconds to the first token of each of its turns."""
    tokens, seconds = [40 + each % 100 for each in range(PROMPT)], list[float]()
    for turn in range(NUM_TURNS):
        request = Request(
            request_id=f"{key}/{turn}",
            prompt_tokens=tuple(tokens),
            noise_key=key,
            sampling=SamplingParams(max_tokens=TURN),
            may_go_on=kept and turn + 1 < NUM_TURNS,
            continues=f"{key}/{turn - 1}" if kept and turn else "",
        )
        began = time.perf_counter()
        engine.submit(request)
        while True:
            report = engine.step()
            if report.emitted and len(seconds) == turn:
                seconds.append(time.perf_counter() - began)
            if report.finished:
                break
        tokens += [*report.finished[0].tokens, *range(40, 40 + OBSERVED)]
    return tokens, seconds


def main() -> None:
    """Measure, print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    own = parser.parse_args()
    cpus = pin(own.threads)
    set_threads(own.threads)
    limits = EngineLimits.of(1, 1024)
    model = load_model(model_directory(own.model), torch.float32, "cpu")
    kept, anew = list[list[float]](), list[list[float]]()
    for repeat in range(1 + own.repeats):
        written = []
        for found, is_kept in ((kept, True), (anew, False)):
            engine = RolloutEngine(model, lambda _: "", limits)  # with an empty KV
            tokens, seconds = episode(engine, repeat, kept=is_kept)
            written.append(tokens)
            found.append(seconds)
        assert written[0] == written[1], "both ways write the same tokens"
    columns = [
        ([each[turn] for each in kept[1:]], [each[turn] for each in anew[1:]])
        for turn in range(NUM_TURNS)
    ]  # the first repeat warms up
    rows = [
        (turn + 1, Spread.of(with_kv), Spread.of(without), ratios(without, with_kv))
        for turn, (with_kv, without) in enumerate(columns)
    ]
    title = f"Seconds to the first token of a turn, {own.model}, {own.threads} thread(s)"
    headings = ("turn", "KV kept", "read anew", "anew over kept")
    names = ("kept_s", "anew_s", "anew_over_kept")
    turns = [dict(zip(names, (each.numbers() for each in row[1:]), strict=True)) for row in rows]
    card = {"bench": "turns", "model": own.model, "threads": own.threads, "turns": turns}
    print_card([Table(f"{title}, {pinned(cpus)}", headings, rows)], card)


if __name__ == "__main__":
    main()
