"""`longtail bench engine`: generation with a real model, in longtail and in other engines.

    plain          longtail, decoding token by token
    chain, tree    longtail with one fixed strategy of drafting
    tuned          longtail as it is used: it drafts where that pays
    transformers   generate of transformers
    vllm           vLLM's CPU build, where --vllm-python names an environment that has it

Every contestant writes the same work, B texts at a time, in turns on the same CPUs. longtail's
texts end by themselves and are always the same; other engines write as many tokens after each
prompt. A turn begins with B texts and ends with its longest one.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, final

from longtail.bench.common.card import DISTURBED, Table, by_position, print_card
from longtail.bench.common.peers import ENGINE_WORKER, PeerProcess
from longtail.bench.common.subject import Subject, drafter_maker, open_subject
from longtail.bench.common.timing import Log, Spread, paired, pin, pinned, progress, ratios
from longtail.bench.options import HISTORY, EngineBenchOptions
from longtail.engine.engine import RolloutEngine
from longtail.engine.report import RolloutMeter
from longtail.engine.request import EngineLimits
from longtail.engine.speculation.speculator import Speculation
from longtail.speculation.drafter import Drafter
from longtail.speculation.strategy import Strategy
from longtail.system.device import set_threads
from longtail.tuner.budget import BudgetTuner
from longtail.types import SamplingParams

PLAIN, TUNED = "plain", "tuned"
STRATEGIES: Mapping[str, Strategy] = {
    "chain 2": Strategy(depth=2, size=2),
    "chain 4": Strategy(depth=4, size=4),
    "chain 8": Strategy(depth=8, size=8),
    "tree 8": Strategy(depth=4, width=2, size=8),
}
"""Fixed strategies."""
_STEP_TOKENS = 9
"""Flat tokens of a request in a step: its root and the largest fixed draft."""
_LEAST_TEXTS = 8
_ROUNDS = 2
"""Texts of a turn for each that runs at a time."""


def run(options: EngineBenchOptions) -> int:
    """Measure, print the card, and end with one JSON line."""
    cpus = pin(options.threads)
    set_threads(options.threads)
    log = progress("engine")
    subject = open_subject(
        options.model,
        options.prompts,
        dtype=options.dtype,
        num_prompts=max(_ROUNDS * max(options.batches), _LEAST_TEXTS),
        sampling=SamplingParams(max_tokens=options.max_tokens),
        log=log,
    )
    with ExitStack() as stack:
        peers = {}
        for kind, python in peer_pythons(options).items():
            log(f"starting {kind}")
            peer = start_peer(kind, python, options, subject)
            peers[kind] = stack.enter_context(peer)
        bench = EngineBench(subject, options, peers, log)
        cells = [bench.measure(batch) for batch in options.batches]
    descriptions = {kind: peer.description for kind, peer in peers.items()}
    dtype = str(subject.target.model.dtype).removeprefix("torch.")
    result = as_json(options, cells, dtype=dtype, peers=descriptions)
    title = f"Generation by {options.model}, {dtype}, {pinned(cpus)}"
    print_card(
        [table(f"{title}; drafter: {options.drafter}", cells)],
        result,
        sentences=sentences(cells),
        json_only=options.json,
    )
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn of a contestant.

    Example: Turn(seconds=2.0, cpu_seconds=2.0, num_tokens=400, accept_length=2.5, texts=((1, 2),))
    """

    seconds: float
    cpu_seconds: float
    """CPU seconds of all threads; below `seconds` when something else had the core."""
    num_tokens: int
    accept_length: float = 0.0
    """Tokens per verified draft; 0 without any."""
    texts: tuple[tuple[int, ...], ...] = ()
    """Tokens of each text; empty for other engines, whose noise is another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One contestant at one batch size; spreads are over the turns."""

    name: str
    tokens_per_s: Spread
    over_plain: Spread
    """Tokens/s over those of plain decoding, within each turn."""
    accept_length: float
    differing_share: float | None
    """Share of the texts that are not those of plain decoding; None for another engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """All contestants at one batch size."""

    batch: int
    num_texts: int
    num_tokens: int
    rows: Sequence[Row]
    best_fixed: str
    tuned_over_best_fixed: Spread
    lowest_cpu_share: float
    """CPU seconds over seconds of the most disturbed turn."""

    def as_json(self) -> dict[str, Any]:
        """Return the figures, with rows by name."""
        return {**asdict(self), "rows": {each.name: asdict(each) for each in self.rows}}


class OwnEngine:
    """longtail's engine as one contestant; it keeps its cost model from turn to turn."""

    def __init__(
        self, subject: Subject, batch: int, speculation: Callable[[], Speculation | None]
    ) -> None:
        self._subject, self._speculation = subject, speculation
        limits = EngineLimits(
            max_running=batch,
            max_step_tokens=max(512, batch * _STEP_TOKENS),
            max_len=max(map(len, subject.prompts)) + subject.sampling.max_tokens,
        )
        self._engine = RolloutEngine(subject.target.model, subject.target.tokenizer.decode, limits)

    def turn(self, num_texts: int) -> Turn:
        """Write all texts."""
        self._engine.speculate(self._speculation())
        requests, meter = self._subject.requests(num_texts), RolloutMeter()
        start, cpu_start = time.perf_counter(), time.process_time()
        completions = self._engine.generate(requests, meter.add)
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
        texts = tuple(each.tokens for each in completions)
        return Turn(
            seconds=seconds,
            cpu_seconds=cpu_seconds,
            num_tokens=sum(map(len, texts)),
            accept_length=meter.report().accept_length,
            texts=texts,
        )


@final
class EngineBench:
    """A subject, its drafter, and the other engines that are compared."""

    def __init__(
        self,
        subject: Subject,
        options: EngineBenchOptions,
        peers: Mapping[str, PeerProcess],
        log: Log,
    ) -> None:
        self._subject, self._options, self._peers, self._log = subject, options, peers, log
        self._make = drafter_maker(options.drafter, subject.target, log)

    def measure(self, batch: int) -> Cell:
        """Run all contestants in turns at one batch size."""
        num_texts = max(_ROUNDS * batch, _LEAST_TEXTS)
        speculations = self._speculations()
        own = {name: OwnEngine(self._subject, batch, each) for name, each in speculations.items()}
        first = own[PLAIN].turn(num_texts)
        work = {
            "prompts": [list(each.prompt_tokens) for each in self._subject.requests(num_texts)],
            "lengths": [len(text) for text in first.texts],
            "running": batch,
        }
        contestants: dict[str, Callable[[], Turn]] = {
            **{name: partial(each.turn, num_texts) for name, each in own.items()},
            **{name: partial(_peer_turn, peer, work) for name, peer in self._peers.items()},
        }
        turns: dict[str, list[Turn]] = {name: [] for name in contestants}

        def take(name: str) -> float:
            turns[name].append(contestants[name]())
            self._log(f"batch {batch}: {name} {turns[name][-1].seconds:.1f} s")
            return turns[name][-1].seconds

        functions = {name: partial(take, name) for name in contestants}
        paired(functions, repeats=self._options.repeats)  # `turns` begin with the warm-up
        return summarize(batch, {name: each[1:] for name, each in turns.items()})

    def _speculations(self) -> dict[str, Callable[[], Speculation | None]]:
        """Return what longtail's contestants draft by, made anew for each turn.

        The tuner keeps its estimates from turn to turn, as from step to step of a run. So does a
        trained drafter; history would remember the texts.
        """
        tuner, kept = BudgetTuner(), self._make()
        drafter: Callable[[], Drafter] = (
            self._make if self._options.drafter == HISTORY else lambda: kept
        )

        def fixed(strategy: Strategy) -> Callable[[], Speculation]:
            return lambda: Speculation.fixed(self._make(), strategy)

        return {
            PLAIN: lambda: None,
            **{name: fixed(strategy) for name, strategy in STRATEGIES.items()},
            TUNED: lambda: Speculation(drafters=(drafter(),), tuner=tuner),
        }


def summarize(batch: int, turns: Mapping[str, Sequence[Turn]]) -> Cell:
    """Return the figures of all contestants from their turns, the n-th of which ran in a row."""
    plain = turns[PLAIN]
    speeds = {name: [each.num_tokens / each.seconds for each in own] for name, own in turns.items()}
    rows = [
        Row(
            name=name,
            tokens_per_s=Spread.of(speeds[name]),
            over_plain=ratios(speeds[name], speeds[PLAIN]),
            accept_length=own[-1].accept_length,
            differing_share=differing_share(plain, own) if own[-1].texts else None,
        )
        for name, own in turns.items()
    ]
    fixed = [row for row in rows if row.name in STRATEGIES]
    best = max(fixed, key=lambda row: row.tokens_per_s.median).name
    every = [each for own in turns.values() for each in own]
    return Cell(
        batch=batch,
        num_texts=len(plain[0].texts),
        num_tokens=plain[0].num_tokens,
        rows=rows,
        best_fixed=best,
        tuned_over_best_fixed=ratios(speeds[TUNED], speeds[best]),
        lowest_cpu_share=min(1.0, *(each.cpu_seconds / each.seconds for each in every)),
    )


def differing_share(plain: Sequence[Turn], own: Sequence[Turn]) -> float:
    """Return the largest share of a turn's texts that are not those of plain decoding."""
    return max(
        sum(a != b for a, b in zip(one.texts, other.texts, strict=True)) / len(one.texts)
        for one, other in zip(plain, own, strict=True)
    )


def start_peer(
    kind: str, python: str, options: EngineBenchOptions, subject: Subject
) -> PeerProcess:
    """Start another engine with the same weights; ConfigError shows why it cannot."""
    spec = {
        "kind": kind,
        "model_dir": str(subject.target.directory),
        "dtype": str(subject.target.model.dtype).removeprefix("torch."),
        "threads": options.threads,
        "max_len": max(map(len, subject.prompts)) + options.max_tokens,
        "max_running": max(options.batches),
    }
    return PeerProcess(python, ENGINE_WORKER, kind, spec, flag=f"--{kind}-python")


def peer_pythons(options: EngineBenchOptions) -> dict[str, str]:
    """Return the interpreter of each other engine."""
    pythons = {"transformers": sys.executable} if options.transformers else {}
    return pythons | ({"vllm": options.vllm_python} if options.vllm_python else {})


def _peer_turn(peer: PeerProcess, work: Mapping[str, Any]) -> Turn:
    answer = peer.ask(work)
    return Turn(**{name: answer[name] for name in ("seconds", "cpu_seconds", "num_tokens")})


def sentences(cells: Sequence[Cell]) -> list[str]:
    """Return what drafting gains at each batch size, and where turns were disturbed."""
    gains = [
        f"{row.over_plain.median:.2f}x at {cell.batch}"
        for cell in cells
        for row in cell.rows
        if row.name == TUNED
    ]
    found = [
        f"With drafts, longtail generates {', '.join(gains)} running, relative to plain decoding."
    ]
    shared = [cell for cell in cells if cell.lowest_cpu_share < DISTURBED]
    for cell in shared:
        share = f"{cell.lowest_cpu_share:.0%}"
        found.append(f"NOTE: other processes ran: a turn at {cell.batch} had {share} of its CPU.")
    return found


def table(title: str, cells: Sequence[Cell]) -> Table:
    """Return a line for each contestant of each cell."""
    rows = [
        (
            f"{cell.batch}, {row.name}",
            f"{row.tokens_per_s.median:,.0f}",
            row.over_plain,
            row.accept_length or None,
            None if row.differing_share is None else f"{row.differing_share:.1%}",
        )
        for cell in cells
        for row in cell.rows
    ]
    headings = ("running, contestant", "tokens/s", "over plain", "accept length", "texts differ")
    return Table(title, by_position(*headings), rows)


def as_json(
    options: EngineBenchOptions, cells: Sequence[Cell], *, dtype: str, peers: Mapping[str, str]
) -> dict[str, Any]:
    """Return every figure."""
    return {
        "bench": "engine",
        "model": options.model,
        "prompts": options.prompts,
        "drafter": options.drafter,
        "dtype": dtype,
        "max_tokens": options.max_tokens,
        "repeats": options.repeats,
        "threads": options.threads,
        "peers": dict(peers),
        "cells": [cell.as_json() for cell in cells],
    }
