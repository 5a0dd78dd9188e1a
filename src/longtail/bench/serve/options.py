"""Options of `longtail bench serve` and what they mean, without torch."""

import argparse
import sys
from dataclasses import dataclass

from longtail.errors import ConfigError

MODELS = ("tiny", "100m")
_LARGE_TEMPERATURE = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is measured.

    Example: Setting(models=("tiny",), clients=(1, 32), temperatures=(0.0, 1.0), dtype=None,
                     tokens=96, calls=2, repeats=3, threads=1, peer_python=None, soak=0)
    """

    models: tuple[str, ...]
    clients: tuple[int, ...]
    """Callers at a time, each with one call at a time."""
    temperatures: tuple[float, ...]
    dtype: str | None
    """None: each model's own, as in `longtail bench rollout`."""
    tokens: int
    """Longest completion."""
    calls: int
    """Of each client in a turn."""
    repeats: int
    threads: int
    peer_python: str | None
    """Interpreter that has `transformers serve`; None: no rival."""
    soak: int
    """Requests of a soak, in place of the measurements."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("--models", metavar="A,B", help=f"of {', '.join(MODELS)} (default: all of them)")
    add("--clients", metavar="N,N", help="callers at a time (default 1,2,4,8,16,32)")
    add("--temperatures", metavar="X,X", default="0,1", help="(default 0,1)")
    add("--dtype", choices=("bfloat16", "float32"), help="(default: float32, 100m bfloat16)")
    add("--tokens", metavar="N", type=int, help="longest completion (default 96)")
    add("--calls", metavar="N", type=int, help="of each client in a turn (default 2)")
    add("--repeats", metavar="N", type=int, help="turns of every contestant (default 3)")
    add("--threads", metavar="N", type=int, default=1, help="compute threads (default 1)")
    add(
        "--peer-python",
        metavar="PYTHON",
        help="python with transformers serve, the rival; none: no rival (default: this one)",
    )
    add("--soak", metavar="N", type=int, default=0, help="only send N requests, good and bad")
    add("--quick", action="store_true", help="defaults become tiny, 1,8, 48 tokens, 1 turn")
    add("--json", action="store_true", help="print the JSON line only")


def read_setting(args: argparse.Namespace) -> Setting:
    """Check the options; ConfigError names the one that is wrong."""
    models, clients, tokens, calls, repeats = ",".join(MODELS), "1,2,4,8,16,32", 96, 2, 3
    if args.quick:
        models, clients, tokens, calls, repeats = "tiny", "1,8", 48, 2, 1
    named = tuple((args.models or models).split(","))
    for name in named:
        if name not in MODELS:
            raise ConfigError(f"--models: {name!r} is not one of {', '.join(MODELS)}")
    setting = Setting(
        models=named,
        clients=_counts(args.clients or clients),
        temperatures=_temperatures(args.temperatures),
        dtype=args.dtype,
        tokens=tokens if args.tokens is None else args.tokens,
        calls=calls if args.calls is None else args.calls,
        repeats=repeats if args.repeats is None else args.repeats,
        threads=args.threads,
        peer_python=None if args.peer_python == "none" else args.peer_python or sys.executable,
        soak=args.soak,
    )
    for option, value, least in (
        ("--tokens", setting.tokens, 2),
        ("--calls", setting.calls, 1),
        ("--repeats", setting.repeats, 1),
        ("--threads", setting.threads, 1),
        ("--soak", setting.soak, 0),
    ):
        if value < least:
            raise ConfigError(f"{option} = {value}: it must be at least {least}")
    return setting


def _counts(text: str) -> tuple[int, ...]:
    if not all(part.isdigit() and 1 <= int(part) <= 64 for part in text.split(",")):
        raise ConfigError(f"--clients = {text!r}: it must be numbers from 1 to 64, as in 1,8,32")
    return tuple(int(part) for part in text.split(","))


def _temperatures(text: str) -> tuple[float, ...]:
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = (-1.0,)
    if not all(0 <= value <= _LARGE_TEMPERATURE for value in found):
        raise ConfigError(f"--temperatures = {text!r}: it must be numbers from 0 to 2, as in 0,1")
    return found
