"""The command line: `longtail VERB ...`. Starts nothing that the verb at hand does not need.

Results go to stdout, everything else to stderr. Exit codes: 0 done, 1 failed, 2 the command line or
the configuration is wrong, 130 interrupted. Programs are imported when their verb runs, so that
help is immediate; what a verb does is the business of its module.
"""

import argparse
import difflib
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module, metadata
from types import MappingProxyType

from longtail.errors import ConfigError, LongtailError

_WIDTH = 96
_SUMMARY = """\
longtail VERB ...

Reinforcement learning of reasoning models, without the long tail of rollouts.

verbs:
  train      train a policy with reinforcement learning
  sft        fine-tune a model on prompts with completions
  drafter    train a drafter that lets a model's rollouts speculate, or evaluate one
  generate   write completions with a model or a run's newest checkpoint
  bench      measure engine, speculation, tuner, learner, drafter or whole runs, paired in one run
  report     show a run on one page: its card, its rollouts, and why it drafted when it did
  doctor     say what this machine offers, what is missing and how to get it

`longtail VERB --help` tells more; `longtail --version` the version.
Start with `longtail train quickstart`."""

_BENCHES = {
    "engine": "Measure the rollout engine against its rivals.",
    "rollout": "Measure what speculation is worth, by fixed strategy.",
    "tuner": "Measure what deciding how much to draft is worth.",
    "learner": "Measure packed against padded batches.",
    "drafter": "Measure drafter training, packed against padded.",
    "e2e": "Measure whole training runs, drafting or not, training the drafter or not.",
}
"""What each module of `bench` that is a program does."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code."""
    logging.basicConfig(level=logging.WARNING, format="longtail: %(message)s")
    words = list(sys.argv[1:] if argv is None else argv)
    # Threads that spin while they wait for each other slow down tenfold as soon as anything else
    # wants their core; asleep they lose a few percent. Read when PyTorch loads OpenMP.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        code = _dispatch(words)
        sys.stdout.flush()
        return code
    except LongtailError as error:
        print(f"longtail: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        print("longtail: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, `head` say, went away
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def parsers() -> dict[str, Callable[[], argparse.ArgumentParser]]:
    """Return what builds the parser of each command, by its name after `longtail`."""
    return {
        "train": _train_parser,
        "sft": _sft_parser,
        "drafter train": _drafter_train_parser,
        "drafter eval": _drafter_eval_parser,
        "generate": _generate_parser,
        **{f"bench {name}": partial(_bench_parser, name) for name in _BENCHES},
        "report": _report_parser,
        "doctor": _doctor_parser,
    }


def summary() -> str:
    """Return what `longtail --help` prints."""
    return f"usage: {_SUMMARY}"


def _dispatch(words: list[str]) -> int:
    verbs: Mapping[str, Callable[[list[str]], int]] = MappingProxyType(
        {
            "train": _train,
            "sft": _sft,
            "drafter": _drafter,
            "generate": _generate,
            "bench": _bench,
            "report": _report,
            "doctor": _doctor,
        }
    )
    match words:
        case []:
            print(summary(), file=sys.stderr)
            return 2
        case ["-h" | "--help" | "help", *_]:
            print(summary())
            return 0
        case ["--version", *_]:
            print(f"longtail {metadata.version('longtail')}")
            return 0
        case [verb, *rest] if verb in verbs:
            return verbs[verb](rest)
    close = difflib.get_close_matches(words[0], verbs, n=1)
    hint = f"did you mean {close[0]}?" if close else f"the verbs are {', '.join(verbs)}"
    raise ConfigError(f"{words[0]}: no such verb; {hint}")


def _train(words: list[str]) -> int:
    from longtail import config, configfile

    own, overrides = _split(words)
    args = _train_parser().parse_args(own)
    loaded = config.load(configfile.locate(args.run) if args.run else None, overrides)
    if args.dry_run:
        from longtail import memory

        table = memory.report(loaded)
        print(config.dump(loaded) + "\n" + "".join(f"# {row}\n" for row in table.splitlines()))
        return 0
    from longtail import loop

    return loop.train(loaded) or 0


def _sft(words: list[str]) -> int:
    from longtail import config, configfile

    own, overrides = _split(words)
    args = _sft_parser().parse_args(own)
    loaded = config.load_sft(configfile.locate(args.run) if args.run else None, overrides)
    if args.dry_run:
        print(config.dump(loaded))
        return 0
    from longtail import sft

    return sft.run(loaded) or 0


def _drafter(words: list[str]) -> int:
    match words:
        case ["train", *rest]:
            return _drafter_train(rest)
        case ["eval", *rest]:
            args = _drafter_eval_parser().parse_args(rest)
            from longtail import drafter_eval

            return drafter_eval.run(args)
    return _usage(words, "usage: longtail drafter {train,eval} [options]; each has its own --help")


def _drafter_train(words: list[str]) -> int:
    from longtail import configfile, drafter_config

    own, overrides = _split(words)
    args = _drafter_train_parser().parse_args(own)
    path = configfile.locate(args.run) if args.run else None
    loaded = drafter_config.load(path, overrides)
    if args.dry_run:
        print(configfile.render(loaded))
        return 0
    from longtail import drafter_train

    return drafter_train.run(loaded) or 0


def _usage(words: list[str], usage: str) -> int:
    """Answer a verb without its noun: on stdout and 0 if that was asked for."""
    helping = bool(words) and words[0] in ("-h", "--help")
    print(usage, file=sys.stdout if helping else sys.stderr)
    return 0 if helping else 2


def _generate(words: list[str]) -> int:
    args = _generate_parser().parse_args(words)
    from longtail import generate

    return generate.run(args)


def _bench(words: list[str]) -> int:
    if not words or words[0] not in _BENCHES:
        each = ",".join(_BENCHES)
        return _usage(words, f"usage: longtail bench {{{each}}} [options]; each has its own --help")
    args = _bench_parser(words[0]).parse_args(words[1:])
    return import_module(f"longtail.bench.{words[0]}").run(args) or 0


def _report(words: list[str]) -> int:
    args = _report_parser().parse_args(words)
    from longtail import run_report

    return run_report.run(args)


def _doctor(words: list[str]) -> int:
    args = _doctor_parser().parse_args(words)
    from longtail import doctor

    return doctor.run(as_json=args.json, run_dir=args.run)


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Part the words of argparse from those of the configuration, which come with their values."""
    own: list[str] = []
    overrides: list[str] = []
    queue = list(words)
    while queue:
        word = queue.pop(0)
        if not word.startswith("--") or word in ("--help", "--dry-run"):
            own.append(word)
            continue
        overrides.append(word)
        if "=" not in word and queue and not queue[0].startswith("--"):
            overrides.append(queue.pop(0))
    return own, overrides


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """The same help on every terminal, so that docs/cli.md can hold it."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=_WIDTH, max_help_position=28)


def _parser(name: str, description: str, **more: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"longtail {name}",
        description=description,
        formatter_class=_Formatter,
        allow_abbrev=False,
        **more,  # type: ignore[arg-type]
    )


def _train_parser() -> argparse.ArgumentParser:
    from longtail import config, configfile

    parser = _parser(
        "train",
        "Train a policy with reinforcement learning; go on where an earlier start was stopped.",
        usage="longtail train [RUN] [--dry-run] [--section.key VALUE ...]",
        epilog=configfile.describe(config.RunConfig),
    )
    recipes = ", ".join(configfile.recipes())
    parser.add_argument(
        "run", metavar="RUN", nargs="?", help=f"TOML file or recipe ({recipes}); none: all defaults"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the resolved configuration and the memory it will take, as TOML",
    )
    return parser


def _sft_parser() -> argparse.ArgumentParser:
    from longtail import config, configfile

    parser = _parser(
        "sft",
        "Fine-tune a model on prompts with completions; the loss is on completions alone.",
        usage="longtail sft [RUN] [--dry-run] [--section.key VALUE ...]",
        epilog=configfile.describe(config.SftConfig),
    )
    parser.add_argument("run", metavar="RUN", nargs="?", help="TOML file; none: all defaults")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the resolved configuration, as TOML"
    )
    return parser


def _drafter_train_parser() -> argparse.ArgumentParser:
    from longtail import configfile, drafter_config

    parser = _parser(
        "drafter train",
        "Train an EAGLE drafter on texts that its target writes first, or on given ones.",
        usage="longtail drafter train [RUN] [--dry-run] [--section.key VALUE ...]",
        epilog=configfile.describe(drafter_config.DrafterTrainConfig),
    )
    parser.add_argument("run", metavar="RUN", nargs="?", help="TOML file; none: all defaults")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the resolved configuration, as TOML"
    )
    return parser


def _drafter_eval_parser() -> argparse.ArgumentParser:
    parser = _parser("drafter eval", "Measure how well a drafter drafts for its target.")
    add = parser.add_argument
    add("drafter", metavar="DRAFTER", help="a drafter, as speculation.drafter of train names it")
    add("--target", metavar="MODEL", default="tiny-reasoner", help="(default tiny-reasoner)")
    add("--prompts", metavar="SOURCE", help="as data.source of train; default: the held-out ones")
    add("--n", metavar="N", type=int, default=32, help="prompts (default 32)")
    add("--max-tokens", metavar="N", type=int, default=1024, help="(default 1024)")
    add("--temperatures", metavar="X,X", default="0,0.6,1", help="(default 0,0.6,1)")
    add("--depth", metavar="N", type=int, default=6, help="of chain and tree (default 6)")
    add("--width", metavar="N", type=int, default=2, help="of the tree (default 2)")
    add("--size", metavar="N", type=int, default=12, help="of the tree (default 12)")
    add("--plot", metavar="FILE", help="also draw a picture, a PNG (extra: plots)")
    add("--dtype", choices=("float32", "bfloat16", "float64"), help="(default: as stored)")
    add("--seed", metavar="N", type=int, default=0, help="of generated prompts (default 0)")
    add("--threads", metavar="N", type=int, default=1, help="compute threads (default 1)")
    add("--json", action="store_true", help="print the JSON line only")
    return parser


def _generate_parser() -> argparse.ArgumentParser:
    parser = _parser("generate", "Write completions of a prompt; a single one is streamed.")
    add = parser.add_argument
    add("model", metavar="MODEL", help="model, checkpoint or run directory, or tiny-reasoner")
    add("--prompt", metavar="TEXT", help="what to complete; default: standard input")
    add("--n", metavar="N", type=int, default=1, help="completions to write (default 1)")
    add("--max-tokens", metavar="N", type=int, default=512, help="longest completion (default 512)")
    add("--temperature", metavar="X", type=float, default=1.0, help="0 is greedy (default 1)")
    add("--top-k", metavar="N", type=int, default=0, help="likeliest tokens kept; 0: all (default)")
    add("--top-p", metavar="X", type=float, default=1.0, help="probability kept (default 1: all)")
    add("--min-p", metavar="X", type=float, default=0.0, help="share of the likeliest (default 0)")
    add("--stop", metavar="TEXT", action="append", default=[], help="end there; may be repeated")
    add("--seed", metavar="N", type=int, default=0, help="of the sampling noise (default 0)")
    add(
        "--dtype",
        choices=("float32", "bfloat16", "float64"),
        help="of weights and KV cache (default: as stored)",
    )
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N (default auto)")
    add("--threads", metavar="N", type=int, default=0, help="compute threads; 0: every core")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--chat", action="store_true", help="apply the chat template, or fail")
    form.add_argument(
        "--raw", action="store_true", help="no chat template (default: where there is one)"
    )
    add("--drafter", metavar="NAME", default="auto", help="as speculation.drafter (default auto)")
    add("--json", action="store_true", help="one JSON object a completion")
    return parser


def _bench_parser(name: str) -> argparse.ArgumentParser:
    parser = _parser(f"bench {name}", _BENCHES[name])
    import_module(f"longtail.bench.{name}").add_arguments(parser)
    return parser


def _report_parser() -> argparse.ArgumentParser:
    parser = _parser(
        "report",
        "Write rollout.png and report.html into a run's directory: card, rollout, switches, costs.",
    )
    parser.add_argument("run", metavar="RUN_DIR", help="directory of a run that speculated")
    parser.add_argument(
        "--step", metavar="N", type=int, help="training step whose rollout is shown (default: last)"
    )
    return parser


def _doctor_parser() -> argparse.ArgumentParser:
    parser = _parser(
        "doctor", "Say what this machine offers, what is missing and the command to get it."
    )
    parser.add_argument(
        "--run", metavar="DIR", help="run whose cost model is shown (default: newest under runs/)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    return parser


if __name__ == "__main__":
    sys.exit(main())
