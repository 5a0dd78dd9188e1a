"""Files that survive a power failure, and whose later damage or edits are detected.

    folder/
      a.bin  sub/b.bin     any files
      state.json           the seal: a document, size and SHA-256 of each file, and its own SHA-256

The document's meaning is the writer's. Nothing is ever unpickled.
"""

import difflib
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from longtail.system.strict_json import parse_json

_FORMAT = 2
_UNSEALED = 1
"""Format of earlier versions, whose seal has no SHA-256 of its own."""
_DIGEST = "sha256"


def fingerprint(path: Path) -> dict[str, Any]:
    """Return size and SHA-256 of a file, as a JSON object."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, _DIGEST).hexdigest()
    return {"bytes": path.stat().st_size, _DIGEST: digest}


def write_atomically(path: Path, text: str) -> None:
    """Replace a file by renaming; the new one is on disk before the old one is removed."""
    temporary = path.with_name(f".new-{path.name}")
    temporary.write_text(text, encoding="utf-8")
    sync(temporary)
    temporary.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Flush a file or a directory to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def seal_folder(root: Path, name: str, document: Mapping[str, Any]) -> None:
    """Write `document` and the fingerprints of all other files to file `name`; sync all files.

    Floats are kept to the last bit. Raises ValueError for NaN and infinity.
    """
    fingerprints = {str(path.relative_to(root)): fingerprint(path) for path in _files(root)}
    body = {"format": _FORMAT, **document, "files": fingerprints}
    text = json.dumps({**body, _DIGEST: _digest(body)}, indent=1, allow_nan=False)
    (root / name).write_text(text, encoding="utf-8")
    for path in _files(root):
        sync(path)
    for directory in (*(path for path in root.rglob("*") if path.is_dir()), root):
        sync(directory)


def open_sealed(root: Path, name: str) -> dict[str, Any]:
    """Return the document of a sealed folder after checking all its files.

    Raises OSError if a file cannot be read, ValueError if a file has changed.
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
        if not isinstance(expected, dict) or fingerprint(root / each) != expected:
            raise ValueError(f"{each} does not have the size and SHA-256 it was written with")
    return document


def read_json(path: Path) -> Any:
    """Read a JSON file. Raises OSError if it cannot be read, JsonError if it is not JSON."""
    return parse_json(path.read_bytes(), allow_nan=True)


def _files(root: Path) -> Iterator[Path]:
    return (path for path in sorted(root.rglob("*")) if path.is_file())


def _digest(document: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a document, independent of layout and key order."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def meant(name: str, known: Iterable[str]) -> str:
    """Return " (is X meant?)" for the known name, or folder in the same place, nearest to `name`.

    Returns "" if none is near.

    Example: meant("smolm2", ("smollm2", "tiny-reasoner")) == " (is smollm2 meant?)"
    """
    if near := difflib.get_close_matches(name, known, 1):
        return f" (is {near[0]} meant?)"
    path = Path(name)
    near = difflib.get_close_matches(path.name, _folders(path.parent), 1, cutoff=0.75)
    return f" (is {path.parent / near[0]} meant?)" if near else ""


def _folders(path: Path) -> list[str]:
    try:
        return [each.name for each in os.scandir(path) if each.is_dir()]
    except OSError:
        return []


def process_of(run_dir: Path) -> int | None:
    """Return the process that holds the lock of a run directory; None if there is none."""
    try:
        inode = (run_dir / ".lock").stat().st_ino
        locks = Path("/proc/locks").read_text()
    except OSError:
        return None
    found = re.search(rf" WRITE (\d+) \S+:{inode} ", locks)
    return None if found is None else int(found[1])
