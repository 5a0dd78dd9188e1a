"""`longtail drafter eval`: measures of a drafter, as a table, a plot and JSON.

The target completes the same prompts with the same noise keys in every setting: each temperature,
coupled and uncoupled, chain and tree. The texts must not depend on the drafts; the share that
differs is measured too. Use held-out prompts of the target's task.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from longtail.assembly.drafters import Target, open_drafter
from longtail.engine.engine import RolloutEngine
from longtail.engine.limits import EngineLimits
from longtail.engine.speculation.acceptance import POSITIONS, Acceptance
from longtail.engine.speculation.speculator import Speculation
from longtail.errors import ConfigError
from longtail.programs.drafter_prompts import open_target, require_prompts
from longtail.report.timeline_plot import PALETTE, blank, frame, write
from longtail.sampling import noise_key
from longtail.speculation.drafter import Drafter
from longtail.speculation.strategy import Strategy
from longtail.system.device import set_threads
from longtail.types import Completion, Request, SamplingParams

_MAX_RUNNING = 16
_WIDTH = 110


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Acceptance of drafts in one setting.

    Example: Measurement(temperature=1.0, coupled=True, strategy=Strategy(depth=6), acceptance=...,
                         differing_share=0.0, calibration_error=0.02)
    """

    temperature: float
    coupled: bool
    strategy: Strategy
    acceptance: Acceptance
    differing_share: float
    """Share of texts that differ from plain decoding."""
    calibration_error: float

    @property
    def shape(self) -> str:
        """Shape of the drafts: chain or tree."""
        return "chain" if self.strategy.width == 1 else "tree"

    @property
    def noise(self) -> str:
        """Whether drafts use the target's noise: coupled or uncoupled."""
        return "coupled" if self.coupled else "uncoupled"

    def lengths(self) -> list[str]:
        """Format the accept length by position; empty where nothing was verified."""
        found = self.acceptance.by_position()
        return [f"{at.mean:.2f}" if at.num_verified else "" for at in found]

    def as_json(self) -> dict[str, Any]:
        """Return all values, fit for JSON."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Prompts, and their completions by plain decoding.

    Example: decode(target, prompts, temperature=1.0, max_tokens=512)
    """

    target: Target
    prompts: Sequence[tuple[int, ...]]
    sampling: SamplingParams
    plain: Sequence[Completion]


def run(args: argparse.Namespace) -> int:
    """Run `longtail drafter eval`; the options are in `cli.options`."""
    set_threads(args.threads)
    temperatures = numbers("--temperatures", args.temperatures)
    strategies = (
        Strategy(depth=args.depth, size=args.depth),
        Strategy(depth=args.depth, width=args.width, size=args.size),
    )
    target = open_target(args)
    prompts = require_prompts(args, target).tokens
    found: list[Measurement] = []
    for temperature in temperatures:
        _log(f"temperature {temperature:g}: plain decoding")
        workload = decode(target, prompts, temperature, args.max_tokens)
        for strategy, coupled in product(strategies, (True, False) if temperature else (True,)):
            drafter = open_drafter(args.drafter, target, _log)
            each = measure(workload, drafter, strategy, coupled=coupled)
            found.append(each)
            _log(
                f"temperature {temperature:g}, {each.shape}, {each.noise}: accept length "
                f"{each.acceptance.overall.mean:.2f}"
            )
    result = {
        "drafter": args.drafter,
        "target": args.target,
        "measured": [m.as_json() for m in found],
    }
    if args.plot is not None:
        plot(found, Path(args.plot), title=f"{args.drafter} for {args.target}")
    if not args.json:
        _print_tables(found)
        if args.plot is not None:
            print(f"plot: {args.plot}")
    print(json.dumps(result))
    return 0


def sampling_of(target: Target, temperature: float, max_tokens: int) -> SamplingParams:
    """Return sampling up to the target's end of text."""
    return SamplingParams(
        temperature=temperature,
        max_tokens=max_tokens,
        stop_token_ids=target.tokenizer.eos_ids,
    )


def decode(
    target: Target, prompts: Sequence[tuple[int, ...]], temperature: float, max_tokens: int
) -> Workload:
    """Complete the prompts by plain decoding."""
    sampling = sampling_of(target, temperature, max_tokens)
    plain = complete(target, prompts, sampling, None)[0]
    return Workload(target=target, prompts=prompts, sampling=sampling, plain=plain)


def measure(
    workload: Workload, drafter: Drafter, strategy: Strategy, *, coupled: bool = True
) -> Measurement:
    """Complete the prompts with a new drafter and compare with plain decoding."""
    speculation = Speculation.fixed(drafter, strategy, coupled=coupled)
    sampling, plain = workload.sampling, workload.plain
    done, acceptance = complete(workload.target, workload.prompts, sampling, speculation)
    different = sum(a.tokens != b.tokens for a, b in zip(plain, done, strict=True))
    return Measurement(
        temperature=sampling.temperature,
        coupled=coupled,
        strategy=strategy,
        acceptance=acceptance,
        differing_share=different / len(plain),
        calibration_error=drafter.calibration_error,
    )


def complete(
    target: Target,
    prompts: Sequence[tuple[int, ...]],
    sampling: SamplingParams,
    speculation: Speculation | None,
) -> tuple[list[Completion], Acceptance]:
    """Complete the prompts with the same noise keys in every call; None: plain decoding."""
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
    acceptance = Acceptance()
    completions = engine.generate(requests, lambda report: acceptance.add(report.verified))
    return completions, acceptance


def _print_tables(found: Sequence[Measurement]) -> None:
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
        cells = [f"{each.temperature:g}", each.shape, each.noise]
        rates = [f"{rate:.2f}" for rate in each.acceptance.rates()]
        table.add_row(
            *cells,
            f"{each.acceptance.overall.mean:.2f}",
            *rates,
            *([""] * (deepest - len(rates))),
            f"{each.calibration_error:.3f}",
            f"{each.differing_share:.1%}",
        )
        positions.add_row(*cells, *each.lengths())
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    console.print(table)
    console.print(positions)


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def plot(found: Sequence[Measurement], path: Path, *, title: str) -> None:
    """Plot accept length, acceptance rate by depth and accept length by position as PNG.

    Raises ConfigError if matplotlib is not installed.
    """
    figure = blank(13.0, 4.2)
    bars, depths, positions = figure.subplots(1, 3, width_ratios=(1.3, 1, 1))
    for index, each in enumerate(found):
        label = f"T {each.temperature:g}, {each.shape}, {each.noise}"
        color = PALETTE[index % len(PALETTE)]
        style = {"color": color, "linestyle": "-" if each.coupled else "--"}
        bars.barh(label, each.acceptance.overall.mean, color=color)
        rates = each.acceptance.rates()
        depths.plot(range(1, len(rates) + 1), rates, marker="o", **style)
        by_position = zip(POSITIONS, each.acceptance.by_position(), strict=True)
        points = [(start, at.mean) for start, at in by_position if at.num_verified >= 20]
        positions.plot([s for s, _ in points], [mean for _, mean in points], marker="o", **style)
    bars.invert_yaxis()
    bars.set(title="accept length", xlabel="tokens per verify step", xlim=(1, None))
    depths.set(title="acceptance rate by depth", xlabel="depth", ylim=(0, 1))
    positions.set(
        title="accept length by position", xlabel="generated tokens before", ylim=(1, None)
    )
    for panel in (depths, positions):
        frame(panel)
    frame(bars, grid="x")
    figure.suptitle(title)
    write(figure, path)


def numbers(option: str, text: str) -> list[float]:
    """Parse comma-separated numbers; ConfigError naming the option."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{option} = {text!r}: it must be numbers, as in 0,0.6,1") from None


def _log(text: str) -> None:
    print(f"drafter eval: {text}", file=sys.stderr, flush=True)
