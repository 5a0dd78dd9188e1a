"""Models by name: `longtail.model.sources.names`, and runs of longtail."""

from collections.abc import Callable
from pathlib import Path

from longtail.model.sources.names import resolve
from longtail.run.checkpoint import policy_directory
from longtail.system.device import to_stderr


def model_directory(
    name: str, log: Callable[[str], None] = to_stderr, *, field: str = "model.path"
) -> Path:
    """Return the Hugging Face directory of a model; that of a run is in its newest checkpoint.

    A model that is not on this machine is fetched or converted first; this can take minutes and is
    logged. Raises ConfigError that names the setting `field`.
    """
    return policy_directory(resolve(name, field, log))
