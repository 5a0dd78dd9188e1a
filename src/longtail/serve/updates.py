"""Weights and drafters that a trainer has written to this machine, read and checked for a service.

Only directories inside one root are read, only as safetensors and JSON. Everything is checked
before the engine sees it: names, shapes, finite values, and the digests that the trainer gives.
"""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

from torch import Tensor

from longtail.assembly.drafters import AUTO, HISTORY, NONE, Target, check_names
from longtail.assembly.engine import open_speculation
from longtail.engine.speculation.speculator import Speculation
from longtail.errors import ConfigError
from longtail.model.hf.model import load_config, read_model
from longtail.model.hf.weights import check_weights
from longtail.serve.protocol import WeightDirectory

_WITHOUT_FILES = (HISTORY, NONE, AUTO)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedDrafters:
    """Drafters that are ready for the engine, and the name by which they can be opened again."""

    name: str
    speculation: Speculation | None


@final
class ModelUpdates:
    """Reads new weights and drafters for one target."""

    def __init__(self, root: Path, target: Target, drafter: str) -> None:
        """`drafter` is the name of the drafters in use; an engine that is made later has them."""
        self._root, self._target = root.resolve(), target
        self.drafter = drafter

    def read_weights(self, update: WeightDirectory) -> dict[str, Tensor]:
        """Return the weights of a directory in main memory, by the names of `Transformer`.

        Raises ConfigError for another model's weights and for a file whose digest differs,
        NonFiniteError for NaN or infinity.
        """
        path, config = self._inside(update.directory), self._target.model.config
        if (path / "config.json").is_file() and load_config(path) != config:
            raise ConfigError(
                f"{path}: its config.json describes another model than the one that is served"
            )
        if update.sha256 is not None:
            _check_digests(path, check_weights(config, path), update.sha256)
        model = read_model(config, path, self._target.model.dtype)
        return {name: parameter.detach() for name, parameter in model.named_parameters()}

    def open_drafter(self, names: str) -> OpenedDrafters:
        """Open drafters by their names; raises ConfigError if one does not fit the target."""
        parts = [
            part if part in _WITHOUT_FILES else str(self._inside(part)) for part in names.split("+")
        ]
        name = "+".join(parts)
        check_names(name, field="drafter")
        return OpenedDrafters(name=name, speculation=open_speculation(name, self._target))

    def _inside(self, directory: str) -> Path:
        """Return the path of a directory inside the root. Raises ConfigError for any other."""
        try:
            path = (self._root / directory).resolve()
        except (OSError, ValueError) as error:
            raise ConfigError(f"directory = {directory!a:.80}: no path ({error})") from error
        if not path.is_relative_to(self._root):
            raise ConfigError(
                f"directory = {directory!a:.80}: only directories inside that of --rl-dir are read"
            )
        if not os.path.isdir(path):  # Path.is_dir raises for a name that is too long
            raise ConfigError(f"directory = {directory!a:.80}: no such directory in --rl-dir")
        return path


def _check_digests(path: Path, files: Mapping[str, Path], digests: Mapping[str, str]) -> None:
    """Compare the files that hold the weights with their digests."""
    for name in sorted({file.name for file in files.values()}):
        if name not in digests:
            raise ConfigError(f"sha256 lacks {name}, which holds weights: give its digest")
        with (path / name).open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != digests[name].lower():
            raise ConfigError(
                f"{path / name}: its SHA-256 is {found}, not {digests[name]!a:.80}: it was changed "
                "or is not complete; write it again"
            )
