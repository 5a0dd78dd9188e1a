"""Options of `longtail bench rollout` and what they mean, without torch."""

import argparse
from dataclasses import dataclass

from longtail.errors import ConfigError

MODEL_NAMES = ("tiny", "100m", "text")
DRAFTER_NAMES = ("history", "eagle1", "eagle3")

DTYPES = {"tiny": "float32", "100m": "bfloat16", "text": "float32"}
"""As the quickstart runs the one, and as a model of that size would be run."""
_SLOWER = {"100m": 6}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is measured.

    Example: Setting(models=("tiny",), drafters=("eagle3",), running=(1, 8), dtype="float32",
                     tokens=1500, repeats=3, threads=1, length=True)
    """

    models: tuple[str, ...]
    drafters: tuple[str, ...]
    running: tuple[int, ...]
    dtype: str | None
    """None: each model's own, see DTYPES."""
    tokens: int
    """Generated in a turn with one request running; more with more, fewer by the 100M model."""
    repeats: int
    threads: int
    length: bool
    """Also measure how accept length holds on long texts."""

    def dtype_of(self, model: str) -> str:
        """Return what a model computes in."""
        return self.dtype or DTYPES[model]

    def tokens_of(self, model: str) -> int:
        """Return the tokens of a turn of one request."""
        return max(self.tokens // _SLOWER.get(model, 1), 50)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    what = "default: all of them; text is trained here once, some 12 minutes"
    add("--models", metavar="A,B", help=f"of {', '.join(MODEL_NAMES)} ({what})")
    add("--drafters", metavar="A,B", help=f"of {', '.join(DRAFTER_NAMES)} (default: all of them)")
    add("--running", metavar="N,N", help="requests that run at a time (default 1,4,8,16,32)")
    add("--dtype", choices=("bfloat16", "float32"), help="(default: float32, 100m bfloat16)")
    add("--tokens", metavar="N", type=int, help="tokens of a turn with one request (default 1500)")
    add("--repeats", metavar="N", type=int, help="turns of every contestant (default 3)")
    add("--threads", metavar="N", type=int, default=1, help="compute threads (default 1)")
    add("--quick", action="store_true", help="defaults become tiny, 1,8, 300 tokens, 1 turn")
    add("--json", action="store_true", help="print the JSON line only")


def read_setting(args: argparse.Namespace) -> Setting:
    """Check the options; ConfigError names the one that is wrong."""
    models, running, tokens, repeats = ",".join(MODEL_NAMES), "1,4,8,16,32", 1500, 3
    if args.quick:
        models, running, tokens, repeats = "tiny", "1,8", 300, 1
    setting = Setting(
        models=_names("--models", args.models or models, MODEL_NAMES),
        drafters=_names("--drafters", args.drafters or ",".join(DRAFTER_NAMES), DRAFTER_NAMES),
        running=_numbers(args.running or running),
        dtype=args.dtype,
        tokens=tokens if args.tokens is None else args.tokens,
        repeats=repeats if args.repeats is None else args.repeats,
        threads=args.threads,
        length=not args.quick,
    )
    for option, value, least in (
        ("--tokens", setting.tokens, 50),
        ("--repeats", setting.repeats, 1),
        ("--threads", setting.threads, 1),
    ):
        if value < least:
            raise ConfigError(f"{option} = {value}: it must be at least {least}")
    return setting


def _names(option: str, text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in known:
            raise ConfigError(f"{option}: {name!r} is not one of {', '.join(known)}")
    return names


def _numbers(text: str) -> tuple[int, ...]:
    if not all(part.isdigit() and 1 <= int(part) <= 256 for part in text.split(",")):
        raise ConfigError(f"--running = {text!r}: it must be numbers from 1 to 256, as in 1,8,32")
    return tuple(int(part) for part in text.split(","))
