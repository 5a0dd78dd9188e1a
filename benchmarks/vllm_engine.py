"""Tokens/s of vLLM with the drafter that it learns, and with a run's own under several rules.

    plain          longtail's keyed noise, no drafts
    loop           the same, with longtail's generator around it, as `longtail train` has it
    learned        a drafter that vLLM learns from nothing, from the warm-up on
    coupled        drafts with the noise of the target, verified by equality
    greedy         vLLM's default: most likely drafts, its own sampler
    probabilistic  vLLM's sampled drafts, verified by the ratio of probabilities

The last three need a run whose drafter is a directory. Each rule is a vLLM in the interpreter of
its environment; all write the same prompts with the same seeds in turns, groups in the order of the
run. `rollout.vllm` has further arguments of all engines. Learned and coupled drafts change no
text.
"""

from script import Batches, Json, Overrides, Repeats, Run, pin, pinned, start

# isort: split

import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import torch
from pydantic import Field, dataclasses

import longtail
from longtail.assembly.drafters import read_drafter
from longtail.bench.card import Log, Spread, Table, print_card, progress, ratios
from longtail.config import files
from longtail.config.rl import RunConfig, load
from longtail.drafter.formats.eagle_export import rounded, write_layout
from longtail.errors import ConfigError
from longtail.system.device import DTYPES, set_threads
from subject import Subject, open_subject
from vllm_process import VllmProcess

RULES: Mapping[str, str] = {
    "plain": "plain, keyed noise",
    "loop": "plain, by longtail's generator",
    "learned": "learned by vLLM, coupled",
    "coupled": "coupled, by equality",
    "greedy": "vLLM's default, greedy drafts",
    "probabilistic": "vLLM, sampled drafts",
}
"""Words of the card for each rule."""
COMPARED = tuple(RULES)[1:]
DRAFTING, WITHOUT = tuple(RULES)[2:], tuple(RULES)[:3]
"""Rules that draft, and those that need no drafter of the run."""
EXACT = ("loop", "learned", "coupled")
"""Rules that change no text."""
_PACKAGES = Path(longtail.__file__).parent.parent

Reply = Mapping[str, Any]
"""Answer of a vLLM for one turn."""
Turns = Mapping[str, Sequence[Reply]]
"""Answers of each rule."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """A run, whose model, prompts and drafter vLLM uses."""

    python: str = Field(description="python of an environment with vLLM")
    run: Run = "smollm2"
    texts: int = Field(
        16, ge=1, description="texts of a turn, new ones in each, at least the number running"
    )
    depth: int = Field(4, ge=1, le=16, description="depth of the draft chains")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="dtype of vLLM")
    batches: Batches = (8,)
    repeats: Repeats = 3
    json: Json = False
    overrides: Overrides = ()


def run(options: Options) -> int:
    """Compare, print the card, and end with one JSON line; return 1 if a promise is broken."""
    cpus = pin(1)
    set_threads(1)
    log = progress("vllm")
    config = load(
        files.locate(options.run), (f"--rollout.dtype={options.dtype}", *options.overrides)
    )
    subject = open_subject(config, (1 + options.repeats) * _texts_of_a_round(options), log)
    engine, turns = measure(subject, config, options, log)
    found = {running: figures(each) for running, each in turns.items()}
    result = {"bench": "vllm", "engine": engine, **_shown(options), "running": found}
    title = (
        f"{engine}, run {options.run} in {options.dtype}, chains of {options.depth}, temperature "
        f"{subject.sampling.temperature:g}, one thread ({pinned(cpus)})"
    )
    tables = [
        table(f"{title}, {running} running, {max(options.texts, running)} texts a turn", each)
        for running, each in found.items()
    ]
    print_card(tables, result, json_only=options.json)
    kept = (
        each["differing_share"][rule]
        for each in found.values()
        for rule in EXACT
        if rule in each["differing_share"]
    )
    return 0 if all(is_kept(share, options) for share in kept) else 1


def _texts_of_a_round(options: Options) -> int:
    """Return the number of texts of a round, a turn with each number running."""
    return sum(max(options.texts, running) for running in options.batches)


def own_drafter(config: RunConfig) -> str | None:
    """Return the run's drafter if it is a directory."""
    name = config.speculation.drafter
    return name if Path(name).is_dir() else None


def measure(
    subject: Subject, config: RunConfig, options: Options, log: Log
) -> tuple[str, dict[int, dict[str, list[Reply]]]]:
    """Start one vLLM for each rule and have them write in turns.

    Return its name and the turns of each rule for each number running.
    """
    drafter = own_drafter(config)
    rules = [rule for rule in RULES if drafter or rule in WITHOUT]
    turns: dict[int, dict[str, list[Reply]]] = {
        running: {rule: [] for rule in rules} for running in options.batches
    }
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        spec = _spec(subject, options) | {"arguments": dict(config.rollout.vllm or {})}
        if drafter is not None:
            spec |= _export(drafter, subject, options, Path(place) / "drafter")
        engines = {}
        for rule in rules:
            log(f"starting vLLM: {rule}")
            engine = VllmProcess(options.python, {**spec, "rule": rule}, flag="--python")
            engines[rule] = stack.enter_context(engine)
        for number in range(-1, options.repeats):  # the first round warms up
            first = (number + 1) * _texts_of_a_round(options)
            for running in options.batches:
                count = max(options.texts, running)
                turn = _turn(subject, count, number + 1, first) | {"running": running}
                first += count
                for rule, engine in engines.items():
                    log(f"round {number + 1} of {options.repeats}: {running} running, {rule}")
                    reply = engine.ask(turn)
                    if number >= 0:
                        turns[running][rule].append(reply)
    return engines["plain"].description, turns


def _export(drafter: str, subject: Subject, options: Options, place: Path) -> dict[str, Any]:
    """Write the drafter as vLLM reads it; return its part of the job of the engines."""
    target = subject.target
    loaded = read_drafter(drafter, target, torch.float32)
    if loaded is None:
        raise ConfigError(f"speculation.drafter = {drafter!r}: it has no weights to export")
    loaded = rounded(loaded, DTYPES[options.dtype])
    write_layout(place, loaded, target.model)
    return {"drafter": str(place), "method": loaded.kind.vllm}


def _spec(subject: Subject, options: Options) -> dict[str, Any]:
    """Return the job of the engines."""
    return {
        "model_dir": str(subject.target.directory),
        "depth": options.depth,
        "dtype": options.dtype,
        "max_len": subject.max_len + options.depth + 1,
        "max_running": max(options.batches),
        "packages": str(_PACKAGES),
        "threads": 1,
    }


def _turn(subject: Subject, count: int, number: int, first: int) -> dict[str, Any]:
    """Return the job of one turn; its seeds are noise keys."""
    requests = subject.requests(count, number, first=first)
    return {
        "prompts": [list(each.prompt_tokens) for each in requests],
        "seeds": [each.noise_key for each in requests],
        "lengths": [subject.sampling.max_tokens] * len(requests),
        "temperature": subject.sampling.temperature,
        "stop_token_ids": list(subject.sampling.stop_token_ids),
    }


def is_kept(share: float, options: Options) -> bool:
    """Return whether texts are equal where that is promised.

    In bfloat16 vLLM's CPU products depend on the number of rows.
    """
    return share == 0.0 or options.dtype == "bfloat16"


def accept_length(turns: Sequence[Reply]) -> float:
    """Return the tokens per verified step over all turns, the bonus token included."""
    accepted = sum(each["num_accepted"] for each in turns)
    return 1 + accepted / max(sum(each["num_drafts"] for each in turns), 1)


def differing_share(turns: Sequence[Reply], plain: Sequence[Reply]) -> float:
    """Return the share of texts that are not those of plain decoding."""
    pairs = [(a["tokens"], b["tokens"]) for a, b in zip(turns, plain, strict=True)]
    return fmean(a != b for one, other in pairs for a, b in zip(one, other, strict=True))


def speeds(turns: Sequence[Reply]) -> list[float]:
    """Return the tokens/s of each turn."""
    return [each["num_tokens"] / each["seconds"] for each in turns]


def figures(turns: Turns) -> dict[str, Any]:
    """Return the figures of all rules for JSON."""
    plain = turns["plain"]
    compared = [rule for rule in COMPARED if rule in turns]
    over = {rule: ratios(speeds(turns[rule]), speeds(plain)).numbers() for rule in compared}
    return {
        "accept_length": {rule: accept_length(turns[rule]) for rule in DRAFTING if rule in turns},
        "differing_share": {rule: differing_share(turns[rule], plain) for rule in compared},
        "throughput_ratio": over,
        "tokens_per_s": {rule: Spread.of(speeds(own)).numbers() for rule, own in turns.items()},
    }


def table(title: str, found: Mapping[str, Any]) -> Table:
    """Return acceptance, speed and texts of each rule, from its `figures`."""
    rows = [
        (
            words,
            f"{found['accept_length'][rule]:.3f}" if rule in DRAFTING else None,
            Spread(**found["tokens_per_s"][rule]).text(0),
            Spread(**found["throughput_ratio"][rule]) if rule in COMPARED else None,
            f"{found['differing_share'][rule]:.0%}" if rule in COMPARED else None,
        )
        for rule, words in RULES.items()
        if rule in found["tokens_per_s"]
    ]
    headings = ("rule", "accept length", "tok/s", "tok/s over plain", "texts not plain's")
    return Table(title, headings, rows)


def _shown(options: Options) -> dict[str, Any]:
    return {key: value for key, value in asdict(options).items() if key not in ("python", "json")}


if __name__ == "__main__":
    sys.exit(start(Options, run))
