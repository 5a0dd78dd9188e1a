"""The command line: `longtail VERB ...`.

Results go to stdout, everything else to stderr, as UTF-8; a closed stream is taken for /dev/null.
Exit codes: 0 done, 1 failed, 2 wrong command line or configuration, 130 interrupted. A program is
imported when its verb runs, so help is immediate.
"""

import errno
import io
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from longtail import __version__
from longtail.cli.commands import COMMANDS
from longtail.errors import ConfigError, LongtailError, did_you_mean
from longtail.system.interrupt import signals_as_ctrl_c

SUMMARY = """\
usage: longtail VERB ...

Reinforcement learning of reasoning models, without the long tail of rollouts.

verbs:
  train      train a policy with reinforcement learning
  sft        fine-tune a model on prompts with completions
  drafter    train, evaluate, export or import a drafter for speculative decoding
  merge      write the whole model of a run that trained adapters
  generate   generate completions with a model or the newest checkpoint of a run
  serve      serve a model or the newest checkpoint of a run with the OpenAI HTTP API
  bench      compare a training run with drafting and without
  report     write the page of a run as one file
  view       show runs on a live web page: rewards, workers, drafts and rollouts to read
  doctor     check packages, hardware and kernels; print remedies

Run `longtail VERB --help` for options, `longtail --version` for the version.
Start with `longtail sft quickstart`, then `longtail train quickstart`."""


_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    set_environment()
    return guarded(lambda: _dispatch(words))


def set_environment() -> None:
    """Set what libraries read when they are loaded, unless it is set; PyTorch comes later."""
    # Compute threads wait for each other 200 times a step. A rollout on two cores of an EPYC, alone
    # and beside a process that takes a core: 11 and 12 s if they sleep at once, 8 and 14 s if they
    # spin for 10 us before, 7 and 27 s for 100 us. PyTorch reads this when it loads OpenMP.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
        os.environ.setdefault("KMP_BLOCKTIME", "0")
    # Large tensors in huge pages: learning allocates gigabytes, and every page costs a fault.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def guarded(program: Callable[[], int]) -> int:
    """Run a program, print its error in a sentence, and return the exit code."""
    _open_streams()
    logging.basicConfig(level=logging.WARNING, format="longtail: %(message)s")
    try:
        with signals_as_ctrl_c():
            code = program()
        sys.stdout.flush()
        return code
    except LongtailError as error:
        print(f"longtail: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        print("longtail: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reading process, such as `head`, has ended
        _drop_output()
        return 1
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        _drop_output()
        print(
            f"longtail: the output cannot be written ({error.strerror}): free some space, or send "
            "it elsewhere",
            file=sys.stderr,
        )
        return 1


def _open_streams() -> None:
    """Give closed streams a place, before another file takes their number, and write UTF-8."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")


def _drop_output() -> None:
    """Send what waits in a stream that cannot be written nowhere: Python writes it at its end."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _dispatch(words: list[str]) -> int:
    match words:
        case []:
            print(SUMMARY, file=sys.stderr)
            return 2
        case ["-h" | "--help" | "help", *_]:
            print(SUMMARY)
            return 0
        case ["--version", *_]:
            print(f"longtail {__version__}")
            return 0
    for count in (2, 1):
        if (name := " ".join(words[:count])) in COMMANDS:
            return COMMANDS[name].run(name, words[count:])
    verbs = list(dict.fromkeys(name.split()[0] for name in COMMANDS))
    if words[0] in verbs:
        return _print_usage(words[0], is_asked=words[1:2] in (["-h"], ["--help"]))
    hint = did_you_mean(words[0], verbs)
    raise ConfigError(f"{words[0]}: no such verb{hint}; the verbs are {', '.join(verbs)}")


def _print_usage(group: str, *, is_asked: bool) -> int:
    """Print the usage of `longtail GROUP NAME ...`; it is an error unless it was asked for."""
    names = [name.split()[1] for name in COMMANDS if name.startswith(f"{group} ")]
    usage = f"usage: longtail {group} {{{','.join(names)}}} [options]; see the --help of each"
    print(usage, file=sys.stdout if is_asked else sys.stderr)
    return 0 if is_asked else 2


if __name__ == "__main__":
    sys.exit(main())
