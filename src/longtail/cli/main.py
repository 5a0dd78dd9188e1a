"""The command line: `longtail VERB ...`.

Results go to stdout, everything else to stderr. Exit codes: 0 done, 1 failed, 2 wrong command line
or configuration, 130 interrupted. A program is imported when its verb runs, so help is immediate.
"""

import difflib
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module, metadata
from types import MappingProxyType

from longtail.bench.registry import BENCHES
from longtail.cli import parsers as cli_parsers
from longtail.errors import ConfigError, LongtailError
from longtail.system.interrupt import signals_as_ctrl_c

_SUMMARY = """\
longtail VERB ...

Reinforcement learning of reasoning models, without the long tail of rollouts.

verbs:
  train      train a policy with reinforcement learning
  sft        fine-tune a model on prompts with completions
  drafter    train, evaluate, export or import a drafter for speculative decoding
  generate   generate completions with a model or the newest checkpoint of a run
  serve      serve a model or the newest checkpoint of a run with the OpenAI HTTP API
  bench      measure engine, speculation, tuner, learner, drafter, serving or whole runs
  report     write one page about a run: its summary, rollouts and drafting decisions
  doctor     check packages, hardware and kernels, and print a remedy for what is missing

Run `longtail VERB --help` for options, `longtail --version` for the version.
Start with `longtail train quickstart`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code."""
    logging.basicConfig(level=logging.WARNING, format="longtail: %(message)s")
    words = list(sys.argv[1:] if argv is None else argv)
    # Threads that spin while they wait get ten times slower when another process needs their core;
    # sleeping threads lose a few percent. PyTorch reads this when it loads OpenMP.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        with signals_as_ctrl_c():
            code = _dispatch(words)
        sys.stdout.flush()
        return code
    except LongtailError as error:
        print(f"longtail: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        print("longtail: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reading process, such as `head`, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


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
            "serve": _serve,
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
    from longtail.config import files as configfile
    from longtail.config import rl as config

    own, overrides = _split(words)
    args = cli_parsers.train_parser().parse_args(own)
    loaded = config.load(configfile.locate(args.run) if args.run else None, overrides)
    if args.dry_run:
        from longtail.build import memory

        table = memory.report(loaded)
        print(
            configfile.render(loaded) + "\n" + "".join(f"# {row}\n" for row in table.splitlines())
        )
        return 0
    from longtail import loop

    return loop.train(loaded) or 0


def _sft(words: list[str]) -> int:
    from longtail.config import files as configfile
    from longtail.config import sft as sft_config

    own, overrides = _split(words)
    args = cli_parsers.sft_parser().parse_args(own)
    path = configfile.locate(args.run) if args.run else None
    loaded = configfile.resolve(sft_config.SftConfig, path, overrides)
    if args.dry_run:
        print(configfile.render(loaded))
        return 0
    from longtail.programs import sft

    return sft.run(loaded) or 0


def _drafter(words: list[str]) -> int:
    match words:
        case ["train", *rest]:
            return _drafter_train(rest)
        case ["eval" | "export" | "import" as noun, *rest]:
            args = cli_parsers.parsers()[f"drafter {noun}"]().parse_args(rest)
            return import_module(f"longtail.programs.drafter_{noun}").run(args) or 0
    nouns = "{train,eval,export,import}"
    return _usage(words, f"usage: longtail drafter {nouns} [options]; see the --help of each")


def _drafter_train(words: list[str]) -> int:
    from longtail.config import drafter as drafter_config
    from longtail.config import files as configfile

    own, overrides = _split(words)
    args = cli_parsers.drafter_train_parser().parse_args(own)
    path = configfile.locate(args.run) if args.run else None
    loaded = configfile.resolve(drafter_config.DrafterTrainConfig, path, overrides)
    if args.dry_run:
        print(configfile.render(loaded))
        return 0
    from longtail.programs import drafter_train

    return drafter_train.run(loaded) or 0


def _usage(words: list[str], usage: str) -> int:
    """Print the usage of a verb without its noun; return 0 if --help was given, else 2."""
    helping = bool(words) and words[0] in ("-h", "--help")
    print(usage, file=sys.stdout if helping else sys.stderr)
    return 0 if helping else 2


def _generate(words: list[str]) -> int:
    args = cli_parsers.generate_parser().parse_args(words)
    from longtail.cli import generate

    return generate.run(args)


def _serve(words: list[str]) -> int:
    args = cli_parsers.serve_parser().parse_args(words)
    from longtail.serve import command

    return command.run(args)


def _bench(words: list[str]) -> int:
    if not words or words[0] not in BENCHES:
        each = ",".join(BENCHES)
        return _usage(words, f"usage: longtail bench {{{each}}} [options]; see the --help of each")
    return BENCHES[words[0]].run(cli_parsers.bench_parser(words[0]).parse_args(words[1:]))


def _report(words: list[str]) -> int:
    args = cli_parsers.report_parser().parse_args(words)
    from longtail.report import page as run_report

    return run_report.run(args)


def _doctor(words: list[str]) -> int:
    args = cli_parsers.doctor_parser().parse_args(words)
    from longtail.cli import doctor

    return doctor.run(as_json=args.json, run_dir=args.run)


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the words into those for argparse and configuration overrides with their values."""
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


if __name__ == "__main__":
    sys.exit(main())
