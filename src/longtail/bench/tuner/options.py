"""Options of `longtail bench tuner` and what they mean, without torch."""

import argparse
from dataclasses import dataclass

from longtail.bench.rollout import options as rollout_setting
from longtail.errors import ConfigError

SHARES = {"good": 0.0, "mediocre": 0.3, "adversarial": 1.0}
"""Drafters, and the share of their tokens that is spoiled."""
RECIPE = "eagle1"
MAX_RUNNING = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is measured.

    Example: Setting(cells=cells, drafters=("good",), num_requests=128, sweeps=True, rolls=True,
                     plot=None)
    """

    cells: rollout_setting.Setting
    """Model, running requests, turns: as `longtail bench rollout` has them."""
    drafters: tuple[str, ...]
    num_requests: int
    """Of the whole rollout."""
    sweeps: bool
    rolls: bool
    plot: str | None
    """File for a picture of the budget tuner's rollout."""

    @property
    def dtype(self) -> str:
        """What the model computes in."""
        return self.cells.dtype_of("tiny")

    def tokens_at(self, running: int) -> int:
        """Return the tokens of a turn with so many requests running."""
        return self.cells.tokens * max(min(running, 2), running // 4)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("--running", metavar="N,N", help="requests that run at a time (default 1,2,4,...,64)")
    add("--drafters", metavar="A,B", help=f"of {', '.join(SHARES)} (default: all of them)")
    add("--dtype", choices=("bfloat16", "float32"), help="(default float32)")
    add("--tokens", metavar="N", type=int, help="tokens of a turn with one request (default 800)")
    add("--repeats", metavar="N", type=int, help="turns of every contestant (default 3)")
    add("--threads", metavar="N", type=int, default=1, help="compute threads (default 1)")
    add("--no-sweep", action="store_true", help="leave out the single points, and the oracle")
    add("--no-rollout", action="store_true", help="leave out the whole rollout")
    add("--plot", metavar="FILE", help="draw the budget tuner's rollout (PNG)")
    what = "defaults become 1,8, 200 tokens, 1 turn; 16 requests in the rollout"
    add("--quick", action="store_true", help=what)
    add("--json", action="store_true", help="print the JSON line only")


def read_setting(args: argparse.Namespace) -> Setting:
    """Check the options; ConfigError names the one that is wrong."""
    running, tokens, repeats, num_requests = "1,2,4,8,16,32,64", 800, 3, 128
    if args.quick:
        running, tokens, repeats, num_requests = "1,8", 200, 1, 16
    drafters = tuple((args.drafters or ",".join(SHARES)).split(","))
    for name in drafters:
        if name not in SHARES:
            raise ConfigError(f"--drafters: {name!r} is not one of {', '.join(SHARES)}")
    if args.no_sweep and args.no_rollout:
        raise ConfigError("--no-sweep and --no-rollout together leave nothing to measure")
    if args.plot and args.no_rollout:
        raise ConfigError("--plot draws the rollout, and --no-rollout leaves it out")
    cells = argparse.Namespace(
        models="tiny",
        drafters=RECIPE,
        running=args.running or running,
        dtype=args.dtype,
        tokens=tokens if args.tokens is None else args.tokens,
        repeats=repeats if args.repeats is None else args.repeats,
        threads=args.threads,
        quick=args.quick,
    )
    return Setting(
        cells=rollout_setting.read_setting(cells),
        drafters=drafters,
        num_requests=num_requests,
        sweeps=not args.no_sweep,
        rolls=not args.no_rollout,
        plot=args.plot,
    )
