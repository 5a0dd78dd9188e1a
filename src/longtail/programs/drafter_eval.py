"""`longtail drafter eval`: measures of a drafter, as a table and JSON.

The target completes the same prompts with the same noise keys in every setting: each temperature,
coupled and uncoupled, chain and tree. The texts must not depend on the drafts; the share that
differs is measured too. Use held-out prompts of the target's task.
"""

import json
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from longtail.assembly.drafters import Target, check_names, open_drafter
from longtail.assembly.engine import open_model
from longtail.assembly.prompts import load_prompts
from longtail.config import files as configfile
from longtail.config.command_options import EvalOptions
from longtail.config.drafter import DrafterTrainConfig
from longtail.config.rl import RunConfig
from longtail.drafter.formats import checkpoint
from longtail.engine.engine import RolloutEngine
from longtail.engine.request import EngineLimits
from longtail.engine.speculation.speculator import Speculation
from longtail.errors import ConfigError
from longtail.generator import Verified
from longtail.model.hf.tokenizer import Tokenizer, load_tokenizer
from longtail.model.sources import smollm2
from longtail.programs.drafter_data import prompts_of, source_rows
from longtail.rl.data.prompts import Encoder
from longtail.rl.data.sources import load_rows
from longtail.run.base_model import model_directory
from longtail.run.checkpoint import CONFIG_FILE, RunDirectory
from longtail.run.drafter_store import drafter_directory, run_drafters
from longtail.sampling import noise_key
from longtail.speculation.strategy import Strategy
from longtail.system.device import set_threads
from longtail.types import Completion, Request, SamplingParams

_MAX_RUNNING = 16
_WIDTH = 110
_PARENTS = 3
"""Number of folders above a drafter among which its run is."""


def run(args: EvalOptions) -> int:
    """Run `longtail drafter eval`."""
    set_threads(args.threads)
    target = open_target(args)
    prompts = find_prompts(args, target)
    found: list[dict[str, Any]] = []
    code = 0
    try:
        for measured in _measurements(args, target, prompts):
            found.append(measured)
            _log(f"{' '.join(_setting(measured))}: accept length {measured['accept_length']:.2f}")
    except KeyboardInterrupt:
        _log(f"stopped after {len(found)} measurements")
        code = 130
    if found and not args.json:
        _print_table(found)
    print(json.dumps({"drafter": args.drafter, "target": args.target, "measured": found}))
    return code


def _measurements(
    args: EvalOptions, target: Target, prompts: Sequence[tuple[int, ...]]
) -> Iterator[dict[str, Any]]:
    """Yield the figures of each setting as soon as it is measured."""
    strategies = (
        Strategy(depth=args.depth, size=args.depth),
        Strategy(depth=args.depth, width=args.width, size=args.size),
    )
    for temperature in args.temperatures:
        _log(f"temperature {temperature:g}: plain decoding")
        sampling = SamplingParams(
            temperature=temperature,
            max_tokens=args.max_tokens,
            stop_token_ids=target.tokenizer.eos_ids,
        )
        plain = complete(target, prompts, sampling, None)[0]
        for strategy, coupled in product(strategies, (True, False) if temperature else (True,)):
            drafter = open_drafter(args.drafter, target)
            speculation = Speculation.fixed(drafter, strategy, coupled=coupled)
            done, drafts = complete(target, prompts, sampling, speculation)
            different = sum(a.tokens != b.tokens for a, b in zip(plain, done, strict=True))
            yield {
                "temperature": temperature,
                "coupled": coupled,
                "shape": "chain" if strategy.width == 1 else "tree",
                "depth": strategy.depth,
                "size": strategy.num_nodes,
                "accept_length": _accept_length(drafts),
                "num_verified": len(drafts),
                "acceptance_rate_by_depth": _rates(drafts),
                "differing_share": different / len(plain),
            }


def _accept_length(drafts: Sequence[Verified]) -> float:
    """Return the mean tokens per verified draft, bonus token included; 0 without any."""
    return 1 + sum(each.num_accepted for each in drafts) / len(drafts) if drafts else 0.0


def _rates(drafts: Sequence[Verified]) -> list[float]:
    """Return for each depth the share of drafts accepted there, among those that reach it."""
    rates = []
    for depth in range(max((each.depth for each in drafts), default=0)):
        reached = [each for each in drafts if depth < min(each.depth, each.num_accepted + 1)]
        accepted = sum(depth < each.num_accepted for each in reached)
        rates.append(accepted / len(reached) if reached else 0.0)
    return rates


def open_target(args: EvalOptions) -> Target:
    """Open the target and, as a check, the drafter; raise ConfigError if one fails.

    Reads target, drafter and dtype. A missing target is set to that of the drafter's
    run.
    """
    check_names(args.drafter, field="DRAFTER")
    args.target = args.target or default_target(args.drafter)
    directory = model_directory(args.target, field="--target")
    target = open_model(args.target, directory, load_tokenizer(directory), args.dtype)
    open_drafter(args.drafter, target)
    return target


def default_target(drafter: str) -> str:
    """Return the run that a drafter is from, the target that it names, or SmolLM2."""
    place = run_drafters(Path(drafter))
    if place is not None:
        return str(place.parent)
    try:
        return checkpoint.target_name(drafter_directory(Path(drafter)))
    except ConfigError:
        return smollm2.NAME


def find_prompts(args: EvalOptions, target: Target) -> tuple[tuple[int, ...], ...]:
    """Return the prompts of --prompts, else those that the run of drafter or target held out.

    Reads target, drafter, prompts, n, max_tokens and seed. Raises ConfigError if there are none.
    """
    source: str | Path | None = args.prompts
    found = None
    if source is None:
        for source in filter(None, (_run_of(args.drafter), _run_of(args.target))):
            found = _of_run(source, target.tokenizer)
            if found:
                break
    else:
        rows = load_rows(str(source), args.n, args.seed, field="--prompts")[: args.n]
        found = prompts_of(rows, str(source), Encoder.of(target.tokenizer))
    if not found:
        raise ConfigError("--prompts is needed: a source of prompts, as data.source of train")
    limit = target.model.config.max_positions - args.max_tokens
    fitting = tuple(tokens for tokens in found if len(tokens) <= limit)[: args.n]
    if not fitting:
        raise ConfigError(
            f"{source}: none of its prompts has at most {limit} tokens; lower --max-tokens"
        )
    return fitting


def _run_of(name: str) -> Path | None:
    """Return the run directory at or above a path."""
    path = Path(name)
    places = (path, *path.absolute().parents[:_PARENTS]) if path.is_dir() else ()
    return next((each for each in places if (each / CONFIG_FILE).is_file()), None)


def _of_run(run: Path, tokenizer: Tokenizer) -> list[tuple[int, ...]] | None:
    """Return the prompts that a run held out, else those that it used; None if it has none."""
    file = run / CONFIG_FILE
    try:
        sections = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read ({error}); give --prompts") from error
    latest = RunDirectory(run).load_latest("state.json")
    now = None if latest is None or not latest.begun else datetime.fromisoformat(latest.begun)
    if "rollout" in sections:
        parts = load_prompts(configfile.resolve(RunConfig, file, []), tokenizer, None, now=now)
        chosen = parts.heldout.prompts or parts.train.prompts
        return [prompt.tokens for prompt in chosen]
    if "target" not in sections:
        return None
    config = configfile.resolve(DrafterTrainConfig, file, [])
    if config.data.completions == "given":
        return None
    rows, data, encoder = source_rows(config), config.data, Encoder.of(tokenizer, config.data, now)
    return prompts_of(rows[-data.heldout_size :], data.source, encoder, data.prompt_column)


def complete(
    target: Target,
    prompts: Sequence[tuple[int, ...]],
    sampling: SamplingParams,
    speculation: Speculation | None,
) -> tuple[list[Completion], list[Verified]]:
    """Complete the prompts with the same noise keys in every call; None: plain decoding.

    Returns the verified drafts, too.
    """
    longest = max(map(len, prompts)) + sampling.max_tokens
    limits = EngineLimits(max_running=_MAX_RUNNING, max_step_tokens=1024, max_len=longest)
    engine = RolloutEngine(target.model, target.tokenizer.decode, limits, speculation=speculation)
    requests = [
        Request(
            request_id=str(index),
            prompt_tokens=prompt,
            noise_key=noise_key(0, "drafter eval", index),
            sampling=sampling,
        )
        for index, prompt in enumerate(prompts)
    ]
    drafts: list[Verified] = []
    return engine.generate(requests, lambda report: drafts.extend(report.verified)), drafts


def _setting(measured: Mapping[str, Any]) -> tuple[str, str, str]:
    noise = "coupled" if measured["coupled"] else "uncoupled"
    return f"T {measured['temperature']:g}", measured["shape"], noise


def _print_table(found: Sequence[Mapping[str, Any]]) -> None:
    deepest = max(len(each["acceptance_rate_by_depth"]) for each in found)
    depths = [f"d{depth}" for depth in range(1, deepest + 1)]
    title = "accept length, acceptance rate by depth, texts that differ"
    table = Table(title=title, title_justify="left")
    for name in ("", "draft", "noise", "length", *depths, "differ"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in found:
        rates = [f"{rate:.2f}" for rate in each["acceptance_rate_by_depth"]]
        table.add_row(
            *_setting(each),
            f"{each['accept_length']:.2f}",
            *rates,
            *([""] * (deepest - len(rates))),
            f"{each['differing_share']:.1%}",
        )
    Console(width=None if sys.stdout.isatty() else _WIDTH).print(table)


def _log(text: str) -> None:
    print(f"drafter eval: {text}", file=sys.stderr, flush=True)
