"""`longtail drafter eval`: how well a drafter drafts, as a table, a picture and JSON.

The target answers the same prompts with the same keys in every setting: each temperature, coupled
and uncoupled, chain and tree. The texts must not depend on the drafts; that they do not is counted,
too. Held-out prompts of the target's own task are what to give.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from longtail.build.drafters import Target, open_drafter
from longtail.build.engine import locate_model, open_model
from longtail.build.trainer import TINY_REASONER
from longtail.config.rl import load
from longtail.engine.engine import RolloutEngine
from longtail.engine.limits import EngineLimits
from longtail.engine.speculation.acceptance import POSITIONS, Acceptance
from longtail.engine.speculation.speculator import Speculation
from longtail.errors import ConfigError
from longtail.model.hf.tokenizer import load_tokenizer
from longtail.report.plots import blank, write
from longtail.rl.data.prompts import Encoder, make_prompts
from longtail.rl.data.sources import load_rows
from longtail.run.checkpoint import CONFIG_FILE
from longtail.run.drafter_store import run_drafters
from longtail.sampling import noise_key
from longtail.speculation.drafter import Drafter
from longtail.speculation.strategy import Strategy
from longtail.system.device import set_threads
from longtail.types import Completion, Request, SamplingParams

_MAX_RUNNING = 16
_WIDE = 110


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One setting.

    Example: Measured(temperature=1.0, coupled=True, strategy=Strategy(depth=6), acceptance=...,
                      differing_share=0.0, calibration_error=0.02)
    """

    temperature: float
    coupled: bool
    strategy: Strategy
    acceptance: Acceptance
    differing_share: float
    """Of the texts, against plain decoding."""
    calibration_error: float

    @property
    def shape(self) -> str:
        """Name the draft's shape."""
        return "chain" if self.strategy.width == 1 else "tree"

    def as_json(self) -> dict[str, Any]:
        """Return every figure."""
        by_position = zip(POSITIONS, self.acceptance.by_position(), strict=True)
        return {
            "temperature": self.temperature,
            "coupled": self.coupled,
            "shape": self.shape,
            "depth": self.strategy.depth,
            "size": self.strategy.num_nodes,
            "accept_length": self.acceptance.overall.mean,
            "num_verified": self.acceptance.overall.num_verified,
            "acceptance_rate_by_depth": self.acceptance.rates(),
            "accept_length_by_position": {
                str(start): found.mean for start, found in by_position if found.num_verified
            },
            "calibration_error": self.calibration_error,
            "differing_share": self.differing_share,
        }


def run(args: argparse.Namespace) -> int:
    """Measure as the command line says; see `cli` for the options."""
    set_threads(args.threads)
    temperatures = numbers("--temperatures", args.temperatures)
    strategies = (
        Strategy(depth=args.depth, size=args.depth),
        Strategy(depth=args.depth, width=args.width, size=args.size),
    )
    target, prompts = open_target(args)
    found: list[Measured] = []
    for temperature in temperatures:
        sampling = SamplingParams(
            temperature=temperature,
            max_tokens=args.max_tokens,
            stop_token_ids=target.tokenizer.eos_ids,
        )
        _say(f"temperature {temperature:g}: plain decoding")
        plain = answer(target, prompts, sampling, None)[0]
        for strategy, coupled in product(strategies, (True, False) if temperature else (True,)):
            own = open_drafter(args.drafter, target, _say)
            measured = measure(own, target, prompts, sampling, strategy, coupled, plain)
            found.append(measured)
            _say(
                f"temperature {temperature:g}, {measured.shape}, "
                f"{'coupled' if coupled else 'uncoupled'}: accept length "
                f"{measured.acceptance.overall.mean:.2f}"
            )
    result = {
        "drafter": args.drafter,
        "target": args.target,
        "measured": [m.as_json() for m in found],
    }
    if args.plot is not None:
        plot(found, Path(args.plot), title=f"{args.drafter} for {args.target}")
    if not args.json:
        _show(found, args.plot)
    print(json.dumps(result))
    return 0


def _usual_target(drafter: str) -> str:
    place = run_drafters(Path(drafter))
    return TINY_REASONER if place is None else str(place.parent)


def _usual_prompts(target: str) -> str:
    """Return the prompts that a run was evaluated with, and for the embedded model its own."""
    source = target
    if target != TINY_REASONER:
        resolved = Path(target) / CONFIG_FILE
        if not resolved.is_file():
            raise ConfigError("--prompts is needed: a source of prompts, as data.source of train")
        own = load(resolved, []).data
        source = own.heldout or own.source
    return f"{TINY_REASONER}:heldout" if source == TINY_REASONER else source


def open_target(args: argparse.Namespace) -> tuple[Target, list[tuple[int, ...]]]:
    """Open the target and its prompts; what cannot be is said before anything is measured.

    Of the arguments: target, drafter, prompts, n, max_tokens, dtype, seed. Where no target is given
    it is the policy of the run that the drafter is from, and is filled in.
    """
    for option, value in (("--n", args.n), ("--max-tokens", args.max_tokens)):
        if value < 1:
            raise ConfigError(f"{option} = {value}: it must be at least 1")
    args.target = args.target or _usual_target(args.drafter)
    directory = locate_model(args.target)
    tokenizer = load_tokenizer(directory)
    target = open_model(args.target, directory, tokenizer, args.dtype)
    source = args.prompts or _usual_prompts(args.target)
    render = tokenizer.render if tokenizer.has_chat_template else None
    prompts = make_prompts(
        load_rows(source, args.n, args.seed, field="--prompts"),
        source=source,
        encoder=Encoder(encode=tokenizer.encode, render=render),
        max_prompt_len=target.model.config.max_positions - args.max_tokens,
        drop_long=True,
    )
    open_drafter(args.drafter, target, _say)
    return target, [prompt.tokens for prompt in prompts.prompts[: args.n]]


def measure(
    own: Drafter,
    target: Target,
    prompts: Sequence[tuple[int, ...]],
    sampling: SamplingParams,
    strategy: Strategy,
    coupled: bool,
    plain: Sequence[Completion],
) -> Measured:
    """Answer with a fresh drafter and compare with what plain decoding wrote."""
    speculation = Speculation.fixed(own, strategy, coupled=coupled)
    written, acceptance = answer(target, prompts, sampling, speculation)
    different = sum(a.tokens != b.tokens for a, b in zip(plain, written, strict=True))
    return Measured(
        temperature=sampling.temperature,
        coupled=coupled,
        strategy=strategy,
        acceptance=acceptance,
        differing_share=different / len(plain),
        calibration_error=own.calibration_error,
    )


def answer(
    target: Target,
    prompts: Sequence[tuple[int, ...]],
    sampling: SamplingParams,
    speculation: Speculation | None,
) -> tuple[list[Completion], Acceptance]:
    """Complete the prompts, always with the same keys; plainly without `speculation`."""
    longest = max(map(len, prompts)) + sampling.max_tokens
    limits = EngineLimits(max_running=_MAX_RUNNING, max_step_tokens=1024, max_len=longest)
    engine = RolloutEngine(target.model, target.tokenizer.decode, limits, speculation=speculation)
    requests = [
        Request(
            request_id=str(index),
            prompt_tokens=prompt,
            noise_key=noise_key(0, "drafter eval", index),
            sampling=replace(sampling),
        )
        for index, prompt in enumerate(prompts)
    ]
    acceptance = Acceptance()
    completions = engine.generate(requests, lambda report: acceptance.add(report.verified))
    return completions, acceptance


def _show(found: Sequence[Measured], plotted: str | None) -> None:
    """Print the tables."""
    deepest = max(len(each.acceptance.rates()) for each in found)
    setting = ("T", "draft", "noise")
    depths = [f"d{depth}" for depth in range(1, deepest + 1)]
    table = _table(
        "accept length, acceptance rate by depth, calibration error, texts that differ",
        (*setting, "length", *depths, "ece", "differ"),
    )
    positions = _table(
        "accept length by generated tokens before the step",
        (*setting, *(f"{start}+" for start in POSITIONS)),
    )
    for each in found:
        who = [f"{each.temperature:g}", each.shape, "coupled" if each.coupled else "uncoupled"]
        rates = [f"{rate:.2f}" for rate in each.acceptance.rates()]
        table.add_row(
            *who,
            f"{each.acceptance.overall.mean:.2f}",
            *rates,
            *([""] * (deepest - len(rates))),
            f"{each.calibration_error:.3f}",
            f"{each.differing_share:.1%}",
        )
        lengths = [
            f"{at.mean:.2f}" if at.num_verified else "" for at in each.acceptance.by_position()
        ]
        positions.add_row(*who, *lengths)
    console = Console(width=None if sys.stdout.isatty() else _WIDE)
    console.print(table)
    console.print(positions)
    if plotted is not None:
        console.print(f"picture: {plotted}")


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def plot(found: Sequence[Measured], path: Path, *, title: str) -> None:
    """Draw accept length, acceptance rate by depth and accept length by position into a PNG.

    Raises ConfigError where matplotlib is not installed.
    """
    figure = blank(13.0, 4.2)
    bars, depths, positions = figure.subplots(1, 3, width_ratios=(1.3, 1, 1))
    for index, each in enumerate(found):
        noise = "coupled" if each.coupled else "uncoupled"
        label = f"T {each.temperature:g}, {each.shape}, {noise}"
        style = {"color": f"C{index}", "linestyle": "-" if each.coupled else "--"}
        bars.barh(label, each.acceptance.overall.mean, color=f"C{index}")
        rates = each.acceptance.rates()
        depths.plot(range(1, len(rates) + 1), rates, marker="o", **style)
        by_position = zip(POSITIONS, each.acceptance.by_position(), strict=True)
        spots = [(start, at.mean) for start, at in by_position if at.num_verified >= 20]
        positions.plot([s for s, _ in spots], [mean for _, mean in spots], marker="o", **style)
    bars.invert_yaxis()
    bars.set(title="accept length", xlabel="tokens a verify step", xlim=(1, None))
    depths.set(title="acceptance rate by depth", xlabel="depth", ylim=(0, 1))
    positions.set(
        title="accept length by position", xlabel="generated tokens before", ylim=(1, None)
    )
    figure.suptitle(title)
    write(figure, path)


def numbers(option: str, text: str) -> list[float]:
    """Read numbers joined by commas; ConfigError naming the option."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{option} = {text!r}: it must be numbers, as in 0,0.6,1") from None
    return found


def _say(text: str) -> None:
    print(f"drafter eval: {text}", file=sys.stderr, flush=True)
