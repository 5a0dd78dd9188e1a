"""Files that survive a power failure, and names of folders."""

import difflib
import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from longtail.system.strict_json import parse_json


def fingerprint(path: Path) -> dict[str, Any]:
    """Return size and SHA-256 of a file, as a JSON object."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


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


def sync_folder(root: Path) -> None:
    """Flush a directory with all its files and directories to disk."""
    for path in (*root.rglob("*"), root):
        sync(path)


def read_json(path: Path) -> Any:
    """Read a JSON file. Raises OSError if it cannot be read, JsonError if it is not JSON."""
    return parse_json(path.read_bytes(), allow_nan=True)


def meant(name: str, known: Iterable[str]) -> str:
    """Return " (is X meant?)" for the known name, or folder in the same place, nearest to `name`.

    Returns "" if none is near.

    Example: meant("smolm2", ("smollm2",)) == " (is smollm2 meant?)"
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
