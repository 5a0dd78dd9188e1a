"""state.json: what a checkpoint holds besides tensors, and digests by which damage is noticed.

{"run_format": 7, "step": 10, "begun": "2026-07-26T10:05:00", "state": {"cursor": ...},
 "files": {"trainer.safetensors": "9f86d0...", ...}, "sha256": digest of the rest}
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longtail.errors import CheckpointError, ConfigError
from longtail.system.files import digest, read_object

_FILE, _OWN_DIGEST = "state.json", "sha256"
RUN_FORMAT = 7
"""Version of state, metric names and configuration fields; runs of other versions do not resume."""


def read_state(path: Path, *, section: str, part: str = "") -> dict[str, Any]:
    """Return state.json of a checkpoint, an object with an object called `section`.

    Raises CheckpointError, with the file's name, if it or a file in the folder `part` is not as it
    was written. Other versions of longtail wrote no digests.
    """
    fields: dict[str, Any] = {section: dict}
    try:
        document = read_object(path / _FILE, **fields)
        if document.get("run_format") == RUN_FORMAT:
            _compare(_FILE, _digest_of(document), document.get(_OWN_DIGEST))
            for name, expected in document["files"].items():
                if name.startswith(part):
                    _compare(name, digest(path / name), expected)
    except (OSError, ConfigError) as error:
        raise damaged(path, error) from error
    return document


def _compare(name: str, found: str, expected: str | None) -> None:
    if found != expected:
        raise ConfigError(f"{name} is not as it was written: its SHA-256 differs")


def damaged(path: Path, error: Exception) -> CheckpointError:
    """Return the error for a checkpoint that cannot be used."""
    return CheckpointError(f"{path} is damaged ({error})")


def write_state(path: Path, document: Mapping[str, Any]) -> None:
    """Write state.json, after all other files of a checkpoint; floats are kept to the last bit."""
    files = sorted(file for file in path.rglob("*") if file.is_file())
    digests = {file.relative_to(path).as_posix(): digest(file) for file in files}
    whole = {"run_format": RUN_FORMAT, **document, "files": digests}
    text = json.dumps({**whole, _OWN_DIGEST: _digest_of(whole)}, indent=1, allow_nan=False)
    (path / _FILE).write_text(text, encoding="utf-8")


def _digest_of(document: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the values of a state, whatever their layout as text."""
    rest = {name: value for name, value in document.items() if name != _OWN_DIGEST}
    return hashlib.sha256(json.dumps(rest).encode()).hexdigest()
