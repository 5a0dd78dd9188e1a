"""Options of `longtail bench e2e` and what they mean, without torch."""

import argparse
from dataclasses import dataclass

from longtail.errors import ConfigError

MODELS, DTYPES = ("tiny", "100m"), ("float32", "float64", "bfloat16")
_GROUP = 8
"""Completions of a prompt. Many arms share this machine's memory: each has room for its share."""
_ARMS = ("off", "history", "frozen", "serial", "spot", "cold", "unplaced")
_USUAL_ARMS = _ARMS[:-1]
"""The last one differs from spot only where prompts come again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is measured.

    Example: Setting(arms=("off", "spot"), model="tiny", workers=2, steps=20, prompts=16,
                     switch_step=None, words=())
    """

    arms: tuple[str, ...]
    model: str
    """Of MODELS."""
    workers: int
    steps: int
    prompts: int
    """A step."""
    switch_step: int | None
    """The first one on another task; None: all are on the same."""
    words: tuple[str, ...]
    """On top of the quickstart's recipe, the same for all arms."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("--arms", metavar="A,B", help=f"of {', '.join(_ARMS)} (default: all but the last)")
    add("--steps", metavar="N", type=int, help="training steps of every arm (default 20)")
    add("--workers", metavar="N", type=int, default=2, help="worker processes (default 2)")
    add(
        "--prompts", metavar="N", type=int, default=16, help="a step, of 8 completions (default 16)"
    )
    add("--model", choices=MODELS, default="tiny", help="100m: its function in a larger shape")
    add("--dtype", choices=DTYPES, default="float32", help="bfloat16: with float32 master weights")
    add("--drafter", metavar="DIR", help="of frozen, serial, spot (default: the model's own)")
    add("--learning-rate", metavar="X", type=float, default=3e-4, help="policy's (default 3e-4)")
    add_task = parser.add_mutually_exclusive_group().add_argument
    again = "after so many, the same again (default 2048)"
    add_task("--problems", metavar="N", type=int, default=2048, help=again)
    add_task("--switch-task", metavar="N", type=int, help="from step N on, ask otherwise")
    add("--plot", metavar="FILE", help="draw the last step of off and spot (PNG)")
    add("--curves", metavar="FILE", help="draw accept length by step, arm by arm (PNG)")
    add("--quick", action="store_true", help="2 steps of 16 completions, off and spot")
    add("--json", action="store_true", help="print the JSON line only")


def read_setting(args: argparse.Namespace) -> Setting:
    """Check the options; ConfigError names the one that is wrong."""
    arms = tuple((args.arms or ("off,spot" if args.quick else ",".join(_USUAL_ARMS))).split(","))
    for name in arms:
        if name not in _ARMS:
            raise ConfigError(f"--arms: {name!r} is not one of {', '.join(_ARMS)}")
    if arms[0] != "off":
        raise ConfigError(f"--arms = {args.arms!r}: off comes first, all others are compared to it")
    steps = args.steps or (2 if args.quick else 20)
    if args.drafter and args.model != "tiny":
        raise ConfigError(f"--drafter = {args.drafter!r}: --model {args.model} has its own")
    prompts, switch = 2 if args.quick else args.prompts, args.switch_task
    numbers = {
        "--steps": steps,
        "--workers": args.workers,
        "--prompts": prompts,
        "--problems": args.problems,
    }
    for option, value in numbers.items():
        if value < 1:
            raise ConfigError(f"{option} = {value}: it must be at least 1")
    if switch is not None and not 1 < switch <= steps:
        raise ConfigError(f"--switch-task = {switch}: it must be 2 to {steps}, the last step")
    words = [
        f"--cluster.workers={args.workers}",
        "--run.threads=1",
        f"--run.steps={steps}",
        "--run.checkpoint_every=1000000",
        "--data.heldout_size=0",
        f"--data.size={args.problems}",
        f"--rollout.prompts_per_step={prompts}",
        f"--rollout.group_size={_GROUP}",
        f"--rollout.max_running={_GROUP * (-(-prompts // args.workers) + 1)}",
        f"--rollout.dtype={args.dtype}",
        f"--learner.dtype={'float32' if args.dtype == 'bfloat16' else args.dtype}",
        f"--learner.autocast={str(args.dtype == 'bfloat16').lower()}",
        f"--learner.learning_rate={args.learning_rate}",
    ]
    if args.drafter:
        words.append(f"--speculation.drafter={args.drafter}")
    if args.quick:
        words.append("--rollout.max_tokens=256")
    return Setting(
        arms=arms,
        model=args.model,
        workers=args.workers,
        steps=steps,
        prompts=prompts,
        switch_step=switch,
        words=tuple(words),
    )
