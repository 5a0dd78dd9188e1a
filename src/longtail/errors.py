"""All exceptions that longtail raises on purpose.

    LongtailError
    +-- ConfigError             (ValueError)       the user can fix it
    |   +-- UnsupportedModelError                  unsupported architecture
    |   +-- DataError                              unusable prompt source, column or tokenizer
    +-- JsonError               (ValueError)       an external text is not strict JSON
    +-- RequestError            (ValueError)       this engine can never serve the request
    +-- NonFiniteError          (ArithmeticError)  NaN or infinity in weights, loss or logits
    +-- CheckpointError         (OSError)          a checkpoint cannot be written or read
    +-- GradingError            (RuntimeError)     a grader failed, so there is no reward
    +-- ProcessGroupError       (ConnectionError)  another learner is lost or late
    +-- ClusterError            (RuntimeError)     workers cannot run the task
    |   +-- LostWorkerError                        the worker's process has ended
    +-- OverloadedError         (RuntimeError)     too many completions wait; retry later
    +-- UnavailableError        (RuntimeError)     the engine failed or the service is stopping

Each class also inherits from a standard exception, and callers may catch either. All have a single
argument, the message, so they can be pickled and sent between processes. `did_you_mean` completes
the message about an unknown name.
"""

import difflib
import traceback
from collections.abc import Iterable
from pathlib import Path

AGAIN = "start again: the run resumes from its newest checkpoint"
"""Remedy of what ends a run."""
MAX_ERROR_LEN = 2000
"""Longest description of another's error, in characters."""
SPACE = f"free some space, then {AGAIN}"
"""Remedy of a run's file that cannot be written."""


class LongtailError(Exception):
    """Base of all exceptions raised on purpose; the command line prints its message."""


class ConfigError(LongtailError, ValueError):
    """A setting is impossible. The message names the field, its value and the remedy."""


class UnsupportedModelError(ConfigError):
    """The model directory holds an architecture that longtail does not implement."""


class DataError(ConfigError):
    """A prompt source, a column or a tokenizer cannot be used."""


class JsonError(LongtailError, ValueError):
    """An external text is not strict JSON. The message does not name the source."""


class RequestError(LongtailError, ValueError):
    """A request can never be served by this engine (too long, empty, bad limits)."""


class NonFiniteError(LongtailError, ArithmeticError):
    """NaN or infinity that ends the run. The message names the tensor and the step."""


class CheckpointError(LongtailError, OSError):
    """A checkpoint cannot be written or read; the previous one is untouched."""


class GradingError(LongtailError, RuntimeError):
    """A grader raised, hung, or returned an invalid value. It never becomes a reward of 0."""


class ProcessGroupError(LongtailError, ConnectionError):
    """Another learner is lost or late. The message names the operation that waited for it."""


class ClusterError(LongtailError, RuntimeError):
    """Workers are lost, late, or in the wrong state. The message names them."""


class LostWorkerError(ClusterError):
    """The process of the called worker has ended."""


class OverloadedError(LongtailError, RuntimeError):
    """The queue of completions is full. The message gives its size."""


class UnavailableError(LongtailError, RuntimeError):
    """A service cannot generate: its engine failed or hangs, or it is shutting down."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return " (did you mean X?)" with the known name that is most like `name`; "" without one.

    A dotted name with the same last part comes first.

    Example: did_you_mean("--steps", ["--run.steps"]) == " (did you mean --run.steps?)"
    """
    names = list(known)
    ends = {_last_part(each): each for each in reversed(names)}
    end = _last_part(name)
    close = [
        *(ends[each] for each in [end] if each in ends),
        *difflib.get_close_matches(name, names, 1, cutoff=0.75),
        *(ends[each] for each in difflib.get_close_matches(end, ends, 1, cutoff=0.75)),
    ]
    return f" (did you mean {close[0]}?)" if close else ""


def _last_part(name: str) -> str:
    return name.rpartition(".")[2].removeprefix("--")


def describe(error: BaseException) -> str:
    """Return an error in one line: our own message, or type, message and place of any other."""
    if isinstance(error, LongtailError):
        text = str(error)[:MAX_ERROR_LEN]
    elif isinstance(error, SyntaxError) and error.filename:
        text = f"{type(error).__name__}: {error.msg} ({Path(error.filename).name}:{error.lineno})"
    else:
        text = "".join(traceback.format_exception_only(error)).strip()[:MAX_ERROR_LEN]
        for last in traceback.extract_tb(error.__traceback__)[-1:]:
            text += f" ({Path(last.filename).name}:{last.lineno}, in {last.name})"
    return "".join(each if each.isprintable() else " " for each in text)
