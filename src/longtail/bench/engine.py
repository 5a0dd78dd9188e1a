"""`longtail bench engine`: generation with a real model, in longtail and in other engines.

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

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, final

from longtail.bench.common.card import DISTURBED, Table, by_position, print_card
from longtail.bench.common.peers import ENGINE_WORKER, PeerProcess
from longtail.bench.common.subject import Drafters, Subject, open_subject
from longtail.bench.common.timing import Log, Spread, pin, pinned, progress, ratios
from longtail.bench.options import EngineBenchOptions
from longtail.config import files
from longtail.config.rl import load
from longtail.engine.engine import RolloutEngine
from longtail.engine.report import RolloutMeter
from longtail.engine.request import EngineLimits
from longtail.engine.speculation.speculator import Speculation
from longtail.speculation.drafter import Drafter
from longtail.system.device import set_threads
from longtail.tuner.budget import BudgetTuner
from longtail.tuner.records import Outcome
from longtail.types import Completion

PLAIN, TUNED = "plain", "tuned"
_STEP_TOKENS = 9
"""Flat tokens of a request in a step for which there is room: its root and a draft."""


def run(options: EngineBenchOptions) -> int:
    """Measure, print the card, and end with one JSON line."""
    cpus = pin(options.threads)
    set_threads(options.threads)
    log = progress("engine")
    config = load(files.locate(options.run), options.overrides)
    num_texts = options.warm + (1 + options.repeats) * most_texts(options)
    subject = open_subject(config, num_texts, log)
    drafters = Drafters(config.speculation.drafter, subject, options.warm, log)
    with ExitStack() as stack:
        peers = {}
        for kind, python in peer_pythons(options).items():
            log(f"starting {kind}")
            peer = start_peer(kind, python, options, subject)
            peers[kind] = stack.enter_context(peer)
        bench = EngineBench(subject, drafters, options, peers, log)
        cells = [bench.measure(batch) for batch in options.batches]
    descriptions = {kind: peer.description for kind, peer in peers.items()}
    result = as_json(options, subject, cells, drafters=drafters.names, peers=descriptions)
    title = (
        f"Generation by {result['model']}, {result['dtype']}, {options.threads} thread(s), "
        f"{pinned(cpus)}; groups of {subject.group_size}, at most {result['max_tokens']} tokens"
    )
    learned = f", after {options.warm} texts" if options.warm else ""
    print_card(
        [table(f"{title}; drafters: {'+'.join(drafters.names) or 'none'}{learned}", cells)],
        result,
        sentences=sentences(cells),
        json_only=options.json,
    )
    return 0


def most_texts(options: EngineBenchOptions) -> int:
    """Return the number of texts of the largest round."""
    return max(options.texts, *options.batches)


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
    seconds_share: float = 0.0
    """Predicted over measured seconds of the steps that verified drafts; 0 without any."""
    nodes_share: float = 0.0
    """Expected over accepted nodes of these steps."""


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
    seconds_share: float
    """Median of the turns' predicted over measured seconds; 0 without drafts."""
    nodes_share: float
    """Median of the turns' expected over accepted nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """All contestants at one batch size."""

    batch: int
    num_texts: int
    num_tokens: int
    rows: Sequence[Row]
    lowest_cpu_share: float
    """CPU seconds over seconds of the most disturbed turn."""

    def as_json(self) -> dict[str, Any]:
        """Return the figures, with rows by name."""
        return {**asdict(self), "rows": {each.name: asdict(each) for each in self.rows}}


class WatchedTuner(BudgetTuner):
    """A tuner whose predictions are compared with the steps, from which costs learned a little."""

    def begin_turn(self) -> None:
        """Forget all steps."""
        self.seconds = self.nodes = (0.0, 0.0)
        """Sums of what was predicted, and of what came."""

    def learn(self, outcome: Outcome) -> None:
        """Compare a step that verified drafts and read no prompts."""
        if outcome.num_nodes and outcome.batch.num_tokens == outcome.batch.num_sampled:
            known, came = self.seconds
            took_s = outcome.seconds - outcome.catch_up_s
            self.seconds = known + self._costs.outcome_s(outcome), came + took_s
            known, came = self.nodes
            self.nodes = known + outcome.num_expected, came + outcome.num_accepted
        super().learn(outcome)


class OwnEngine:
    """longtail's engine as one contestant."""

    def __init__(self, subject: Subject, batch: int, drafters: tuple[Drafter, ...] = ()) -> None:
        self._subject = subject
        self._tuner = WatchedTuner()
        limits = EngineLimits(
            max_running=batch,
            max_step_tokens=max(512, batch * _STEP_TOKENS),
            max_len=subject.max_len,
        )
        target = subject.target
        self._engine = RolloutEngine(
            target.model,
            target.tokenizer.decode,
            limits,
            speculation=Speculation(drafters=drafters, tuner=self._tuner) if drafters else None,
        )

    def begin(self, first: int, num_texts: int) -> None:
        """Submit the texts of a turn, from number `first` on."""
        self._requests = self._subject.requests(num_texts, first=first)
        self._meter, self._done = RolloutMeter(), dict[str, Completion]()
        self._tuner.begin_turn()
        self._seconds = self._cpu_seconds = 0.0
        for request in self._requests:
            self._engine.submit(request)

    def step(self) -> bool:
        """Make one step of the turn; return whether there are more."""
        start, cpu_start = time.perf_counter(), time.process_time()
        report = self._engine.step()
        self._seconds += time.perf_counter() - start
        self._cpu_seconds += time.process_time() - cpu_start
        self._meter.add(report)
        self._done |= {each.request_id: each for each in report.finished}
        return len(self._done) < len(self._requests)

    def end(self) -> Turn:
        """Return the turn."""
        texts = tuple(self._done[each.request_id].tokens for each in self._requests)
        return Turn(
            seconds=self._seconds,
            cpu_seconds=self._cpu_seconds,
            num_tokens=sum(map(len, texts)),
            accept_length=self._meter.report().accept_length,
            texts=texts,
            seconds_share=_share(*self._tuner.seconds),
            nodes_share=_share(*self._tuner.nodes),
        )


def _share(predicted: float, came: float) -> float:
    return predicted / came if came else 0.0


def round_of(engines: Mapping[str, OwnEngine], first: int, num_texts: int) -> dict[str, Turn]:
    """Write the texts with all engines, a step of each at a time."""
    for engine in engines.values():
        engine.begin(first, num_texts)
    writing = list(engines.values())
    while writing:
        writing = [engine for engine in writing if engine.step()]
    return {name: engine.end() for name, engine in engines.items()}


@final
class EngineBench:
    """A subject, its drafters, and the other engines that are compared."""

    def __init__(
        self,
        subject: Subject,
        drafters: Drafters,
        options: EngineBenchOptions,
        peers: Mapping[str, PeerProcess],
        log: Log,
    ) -> None:
        self._subject, self._drafters, self._options = subject, drafters, options
        self._peers, self._log = peers, log

    def measure(self, batch: int) -> Cell:
        """Run all contestants in turns at one batch size."""
        num_texts = max(self._options.texts, batch)
        own = {
            name: OwnEngine(self._subject, batch, self._drafters.open(some))
            for name, some in self._sets().items()
        }
        turns: dict[str, list[Turn]] = {name: [] for name in (*own, *self._peers)}
        for number in range(1 + self._options.repeats):  # the first round warms up
            first = self._options.warm + number * num_texts
            found = round_of(own, first, num_texts)
            if self._peers:
                requests = self._subject.requests(num_texts, first=first)
                work = {
                    "prompts": [list(each.prompt_tokens) for each in requests],
                    "lengths": [len(text) for text in found[PLAIN].texts],
                    "running": batch,
                }
                found |= {name: _peer_turn(peer, work) for name, peer in self._peers.items()}
            seconds = ", ".join(f"{name} {turn.seconds:.1f} s" for name, turn in found.items())
            self._log(f"{batch} running, round {number} of {self._options.repeats}: {seconds}")
            for name, turn in found.items() if number else ():
                turns[name].append(turn)
        return summarize(batch, turns)

    def _sets(self) -> dict[str, Sequence[str]]:
        """Return the drafters of each of longtail's contestants."""
        chosen, names = self._options.contestants, self._drafters.names
        found: dict[str, Sequence[str]] = {PLAIN: ()}
        if "alone" in chosen and len(names) > 1:
            found |= {name: (name,) for name in names}
        if TUNED in chosen and names:
            found[TUNED] = names
        return found


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
            seconds_share=median(each.seconds_share for each in own),
            nodes_share=median(each.nodes_share for each in own),
        )
        for name, own in turns.items()
    ]
    every = [each for own in turns.values() for each in own]
    return Cell(
        batch=batch,
        num_texts=sum(len(each.texts) for each in plain),
        num_tokens=sum(each.num_tokens for each in plain),
        rows=rows,
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
        "max_len": subject.max_len,
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
            f"{row.seconds_share:.2f}, {row.nodes_share:.2f}" if row.nodes_share else None,
        )
        for cell in cells
        for row in cell.rows
    ]
    headings = ("running, contestant", "tokens/s", "over plain", "accept length", "texts differ",
                "predicted s, nodes")  # fmt: skip
    return Table(title, by_position(*headings), rows)


def as_json(
    options: EngineBenchOptions,
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
        "cells": [cell.as_json() for cell in cells],
    }
