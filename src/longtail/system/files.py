"""Files that survive a power cut, and show it when they were damaged or edited since.

    folder/
      a.bin  sub/b.bin     anything
      state.json           the seal: a document, size and SHA-256 of each file above, and of itself

Its writer decides what the document means. Nothing is ever unpickled.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from longtail.system.strict_json import parse_json

_FORMAT = 2
_UNSEALED = 1
"""Format of earlier versions, whose seal has no digest of its own."""
_DIGEST = "sha256"


def print_of(path: Path) -> dict[str, Any]:
    """Return size and SHA-256 of a file, as JSON holds them."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, _DIGEST).hexdigest()
    return {"bytes": path.stat().st_size, _DIGEST: digest}


def write_atomically(path: Path, text: str) -> None:
    """Replace a file in one rename; the new one is on disk before the old one is gone."""
    temporary = path.with_name(f".new-{path.name}")
    temporary.write_text(text, encoding="utf-8")
    sync(temporary)
    temporary.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Make a file or a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def seal_folder(root: Path, name: str, document: Mapping[str, Any]) -> None:
    """Write `document` into file `name`, with the prints of all other files, and sync everything.

    Floats come back to the last bit; NaN and infinity are refused with ValueError.
    """
    prints = {str(path.relative_to(root)): print_of(path) for path in _files(root)}
    body = {"format": _FORMAT, **document, "files": prints}
    text = json.dumps({**body, _DIGEST: _digest(body)}, indent=1, allow_nan=False)
    (root / name).write_text(text, encoding="utf-8")
    for path in _files(root):
        sync(path)
    for directory in (*(path for path in root.rglob("*") if path.is_dir()), root):
        sync(directory)


def open_sealed(root: Path, name: str) -> dict[str, Any]:
    """Return the document of a sealed folder all of whose files are as they were written.

    Raises OSError where a file cannot be read, ValueError where anything is not as it was written.
    """
    document = read_json(root / name)
    if not isinstance(document, dict) or not isinstance(document.get("files"), dict):
        raise ValueError(f"{name} is not what was written")
    written_as, digest = document.get("format"), document.pop(_DIGEST, None)
    if written_as not in (_UNSEALED, _FORMAT):
        raise ValueError(f"{name} has format {written_as!r:.40}, known is {_FORMAT}")
    if written_as != _UNSEALED and digest != _digest(document):
        raise ValueError(f"{name} does not have the SHA-256 it was written with")
    for each, expected in document["files"].items():
        if not isinstance(expected, dict) or print_of(root / each) != expected:
            raise ValueError(f"{each} does not have the size and SHA-256 it was written with")
    return document


def read_json(path: Path) -> Any:
    """Read a JSON file; OSError where it cannot be read, JsonError for whatever is no JSON."""
    return parse_json(path.read_bytes(), allow_nan=True)


def _files(root: Path) -> Iterator[Path]:
    return (path for path in sorted(root.rglob("*")) if path.is_file())


def _digest(document: Mapping[str, Any]) -> str:
    """Digest what JSON makes of a document, whatever its layout and the order of its keys."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
