"""Every error longtail raises on purpose.

    LongtailError
    +-- ConfigError             (ValueError)       the user can fix it: names field, value, remedy
    |   +-- UnsupportedModelError                  the architecture is not one of ours
    |   +-- DataError                              a prompt source, column or tokenizer is unusable
    +-- JsonError               (ValueError)       a text from outside is not strict JSON
    +-- RequestError            (ValueError)       one request cannot be served by this engine
    +-- NonFiniteError          (ArithmeticError)  NaN or infinity in weights, loss or logits
    +-- CheckpointError         (OSError)          a checkpoint cannot be written or read
    +-- GradingError            (RuntimeError)     a grader failed; the completion has no reward
    +-- ProcessGroupError       (ConnectionError)  another learner process is gone or late
    +-- ClusterError            (RuntimeError)     workers cannot do what the step wants
    |   +-- LostWorkerError                        a worker's process is gone
    +-- CompletionError         (RuntimeError)     one completion failed; its service goes on
    +-- OverloadedError         (RuntimeError)     too many completions wait; ask again later
    +-- UnavailableError        (RuntimeError)     the engine behind a service failed or stops

Each class also inherits the standard exception it refines, so callers may catch either. All of
them carry a single message, hence pickle and cross process boundaries.
"""


class LongtailError(Exception):
    """Base of everything raised on purpose; `except LongtailError` is what the CLI prints."""


class ConfigError(LongtailError, ValueError):
    """The user asked for something impossible. The message names field, value and remedy."""


class UnsupportedModelError(ConfigError):
    """The model directory holds an architecture that longtail does not implement."""


class DataError(ConfigError):
    """A prompt source, a column or a tokenizer cannot be used."""


class JsonError(LongtailError, ValueError):
    """A text from outside is not the strict JSON that is read; the message does not name it."""


class RequestError(LongtailError, ValueError):
    """A generation request can never be served by this engine (too long, empty, bad limits)."""


class NonFiniteError(LongtailError, ArithmeticError):
    """NaN or infinity where the run cannot go on. The message names the tensor and the step."""


class CheckpointError(LongtailError, OSError):
    """A checkpoint could not be written or read; the previous one is untouched."""


class GradingError(LongtailError, RuntimeError):
    """A grader raised, hung, or returned nonsense. Never turned into a reward of 0."""


class ProcessGroupError(LongtailError, ConnectionError):
    """Another process of the learner's group is gone or late. The message names the operation."""


class ClusterError(LongtailError, RuntimeError):
    """Workers are lost, late, or in no state for what is asked of them. The message names them."""


class LostWorkerError(ClusterError):
    """The process of the worker that was asked is gone."""


class CompletionError(LongtailError, RuntimeError):
    """One completion could not be written. The engine and all other completions go on."""


class OverloadedError(LongtailError, RuntimeError):
    """As many completions as may wait do; the message says how many."""


class UnavailableError(LongtailError, RuntimeError):
    """A service cannot write: its engine failed, hangs, or the service is shutting down."""
