"""The command line: `longtail VERB ...`.

Results go to stdout, everything else to stderr. Exit codes: 0 done, 1 failed, 2 wrong command line
or configuration, 130 interrupted. A program is imported when its verb runs, so help is immediate.
"""

import difflib
import logging
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from longtail import __version__
from longtail.bench.common.options import OVERRIDES, split_overrides
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
  bench      measure whole runs, generation, the learner, or longtail inside TRL or vLLM
  report     write one page about a run: its summary, rollouts and drafting decisions
  view       show runs on a live web page: rewards, workers, drafts and rollouts to read
  doctor     check packages, hardware and kernels, and print a remedy for what is missing

Run `longtail VERB --help` for options, `longtail --version` for the version.
Start with `longtail sft quickstart`, then `longtail train quickstart`."""


_PROGRAMS = {
    "generate": "cli.generate",
    "serve": "serve.command",
    "report": "report.page",
    "view": "view.command",
    "doctor": "cli.doctor",
    "drafter eval": "programs.drafter_eval",
    "drafter export": "programs.drafter_export",
    "drafter import": "programs.drafter_import",
}
"""Module of each command; its `run` takes the parsed options."""

_CONFIGURED_PROGRAMS = {
    "train": "loop.train",
    "sft": "programs.sft.run",
    "drafter train": "programs.drafter_train.run",
}
"""Function of each command that takes a configuration."""


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
    match words:
        case []:
            print(summary(), file=sys.stderr)
            return 2
        case ["-h" | "--help" | "help", *_]:
            print(summary())
            return 0
        case ["--version", *_]:
            print(f"longtail {__version__}")
            return 0
        case ["drafter" | "bench" as group, *rest]:
            return _dispatch_group(group, rest)
    verbs = list(dict.fromkeys(name.split()[0] for name in cli_parsers.parsers()))
    if words[0] in verbs:
        return _run(words[0], words[1:])
    close = difflib.get_close_matches(words[0], verbs, n=1)
    hint = f"did you mean {close[0]}?" if close else f"the verbs are {', '.join(verbs)}"
    raise ConfigError(f"{words[0]}: no such verb; {hint}")


def _dispatch_group(group: str, words: list[str]) -> int:
    """Run `longtail GROUP NAME ...`; print the usage if the name is missing or unknown."""
    names = [name.split()[1] for name in cli_parsers.parsers() if name.startswith(f"{group} ")]
    if words and words[0] in names:
        return _run(f"{group} {words[0]}", words[1:])
    usage = f"usage: longtail {group} {{{','.join(names)}}} [options]; see the --help of each"
    is_help = bool(words) and words[0] in ("-h", "--help")
    print(usage, file=sys.stdout if is_help else sys.stderr)
    return 0 if is_help else 2


def _run(command: str, words: list[str]) -> int:
    """Parse the options of a command, import its program and run it."""
    if command in cli_parsers.CONFIGURED:
        return _run_configured(command, words)
    parser = cli_parsers.parsers()[command]()
    if parser.get_default(OVERRIDES) is None:
        args = parser.parse_args(words)
    else:  # a command whose options and configuration share the line
        own, overrides = split_overrides(words)
        args = parser.parse_args(own)
        args.overrides = overrides
    if command.startswith("bench "):
        return BENCHES[command.removeprefix("bench ")].run(args)
    return import_module(f"longtail.{_PROGRAMS[command]}").run(args) or 0


def _run_configured(command: str, words: list[str]) -> int:
    """Resolve the configuration of a command, then print it or run the command with it."""
    from longtail.config import files

    own, overrides = _split(words)
    args = cli_parsers.parsers()[command]().parse_args(own)
    path = files.locate(args.run, command) if args.run else None
    config = files.resolve(cli_parsers.config_class(command), path, overrides)
    if not args.dry_run:
        module, _, name = _CONFIGURED_PROGRAMS[command].rpartition(".")
        return getattr(import_module(f"longtail.{module}"), name)(config) or 0
    from longtail.assembly.precision import decided

    config = decided(config)
    print(files.render(config))
    if command == "train":
        from longtail.assembly import memory

        print("".join(f"# {row}\n" for row in memory.report(config).splitlines()))
    return 0


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
