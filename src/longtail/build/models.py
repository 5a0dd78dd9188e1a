"""Models by name: `longtail.model.sources.names`, the embedded model, and runs of longtail."""

from collections.abc import Callable
from pathlib import Path

from longtail.model.sources.names import resolve
from longtail.run.checkpoint import policy_directory
from longtail.system.cache import cache_directory
from longtail.system.device import to_stderr
from longtail.tiny import warmstart

TINY_REASONER = "tiny-reasoner"
_LOG_EVERY = 50


def model_directory(
    name: str, log: Callable[[str], None] = to_stderr, *, field: str = "model.path"
) -> Path:
    """Return the Hugging Face directory of a model; that of a run is in its newest checkpoint.

    A model that is not on this machine is fetched, converted or, if embedded, trained first; this
    can take minutes and is logged. Raises ConfigError that names the setting `field`.
    """
    if name != TINY_REASONER:
        return policy_directory(resolve(name, field, log))

    def report(progress: warmstart.TrainingProgress) -> None:
        if progress.step == 1:
            log(f"training the tiny reasoner, once; cached in {cache_directory()}")
        if progress.step % _LOG_EVERY == 0 or progress.step == progress.steps:
            log(progress.line())

    return warmstart.ensure(on_progress=report)


def model_name(directory: str) -> str:
    """Return the name of a model directory, which is its path unless it is the embedded model's."""
    embedded = cache_directory() / warmstart.SOURCE
    return TINY_REASONER if Path(directory).parent == embedded else directory
