"""Options of `longtail bench gpu` and what they mean, without torch."""

import argparse
from dataclasses import dataclass

from longtail.errors import ConfigError

PARTS = ("checks", "attention", "sampling", "small", "steps", "graphs", "speculation", "training")
_NEEDS_REASONER = ("training",)
"""Not in `--quick` unless asked for: the tiny reasoner may have to be taught first, in minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is measured.

    Example: Setting(parts=("checks", "steps"), device="cuda", quick=False, repeats=10)
    """

    parts: tuple[str, ...]
    device: str
    quick: bool
    """Shapes of a toy."""
    repeats: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("--parts", metavar="A,B", help=f"of {', '.join(PARTS)} (default: all of them)")
    add("--device", metavar="NAME", default="cuda", help="cpu is for --quick (default cuda)")
    add("--repeats", metavar="N", type=int, help="runs of each measurement (default 10)")
    add("--quick", action="store_true", help="shapes of a toy, 2 runs: tries the bench itself")
    add("--json", action="store_true", help="print the JSON line only")


def read_setting(args: argparse.Namespace) -> Setting:
    """Check the options; ConfigError names the one that is wrong."""
    usual = tuple(name for name in PARTS if not (args.quick and name in _NEEDS_REASONER))
    parts = usual if args.parts is None else tuple(args.parts.split(","))
    for name in parts:
        if name not in PARTS:
            raise ConfigError(f"--parts: {name!r} is not one of {', '.join(PARTS)}")
    repeats = args.repeats if args.repeats is not None else 2 if args.quick else 10
    if not 1 <= repeats <= 1000:
        raise ConfigError(f"--repeats = {repeats}: it must be from 1 to 1000")
    if args.device == "cpu" and not args.quick:
        raise ConfigError("--device cpu: a CPU only tries the bench itself; add --quick")
    if args.device != "cpu" and not args.device.startswith("cuda"):
        raise ConfigError(f"--device = {args.device!r}: it must be cuda, cuda:N or cpu")
    return Setting(parts=parts, device=args.device, quick=args.quick, repeats=repeats)
