"""Files that survive a power failure, names of folders, and strict JSON from outside."""

import difflib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from longtail.errors import CheckpointError, ConfigError, JsonError


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, as `sha256sum` prints it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


_BLOCK, _MOST_THREADS = 2**24, 8


def digest(path: Path) -> str:
    """Return the SHA-256 of the SHA-256s of a file's blocks of 16 MiB, which threads compute.

    One core computes about 1 GB/s, so a checkpoint of many gigabytes takes several.
    """
    starts = range(0, path.stat().st_size, _BLOCK)
    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as threads:
        blocks = list(threads.map(partial(_block_digest, path), starts))
    return hashlib.sha256(b"".join(blocks)).hexdigest()


def _block_digest(path: Path, start: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return hashlib.sha256(file.read(_BLOCK)).digest()


@contextmanager
def writing(
    what: str, path: Path, remedy: str = "free some space, or choose another path"
) -> Iterator[None]:
    """Raise CheckpointError, with the remedy, for an error of the disk in this context."""
    try:
        yield
    except CheckpointError:  # also an OSError, and has its own message
        raise
    except OSError as error:
        reason = error.strerror or error
        raise CheckpointError(f"{what} cannot be written to {path} ({reason}): {remedy}") from error


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


def replace_folder(path: Path, write: Callable[[Path], None]) -> None:
    """Make a folder by `write`, in place of one that may exist: it is on disk whole, or unchanged.

    `write` gets a temporary name. A kill between two renames leaves the old one under `.old-NAME`.
    """
    temporary = path.with_name(f".new-{path.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        write(temporary)
        sync_folder(temporary)
        old = _put_aside(path)
        temporary.rename(path)
        sync(path.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)


def remove_folder(path: Path) -> None:
    """Remove a folder, if it exists, under a temporary name."""
    shutil.rmtree(_put_aside(path), ignore_errors=True)


def _put_aside(path: Path) -> Path:
    """Rename a folder, if it exists; return its temporary name."""
    aside = path.with_name(f".old-{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    if path.exists():
        path.rename(aside)
    return aside


def read_object(path: Path, *, allow_nan: bool = False, **fields: type) -> dict[str, Any]:
    """Read a JSON object that has at least these fields, of these types; see `parse_json`.

    Raises ConfigError, which names the file and the field, if it is missing or something else.
    """
    try:
        found = parse_json(read_file(path), allow_nan=allow_nan)
    except (OSError, JsonError) as error:
        raise ConfigError(f"{path} is not JSON ({error}): copy the file again") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} must hold one JSON object: copy the file again")
    for name, kind in fields.items():
        if type(value := found.get(name)) is not kind:
            raise ConfigError(
                f"{path}: {name} is {value!a:.40}, wanted is {kind.__name__}: copy the file again"
            )
    return found


def read_file(path: Path) -> bytes:
    """Read a file whole. Raises OSError if it cannot be read, or is a pipe or a device."""
    if path.exists() and not path.is_file():
        raise OSError("it is not a file")
    return path.read_bytes()


def similar_folders(name: str) -> list[str]:
    """Return the folder in the same place with a similar name; empty without one."""
    path = Path(name)
    try:
        names = [each.name for each in os.scandir(path.parent) if each.is_dir()]
    except OSError:
        return []
    near = difflib.get_close_matches(path.name, names, 1, cutoff=0.75)
    return [str(path.parent / each) for each in near]


def process_of(run_dir: Path) -> int | None:
    """Return the process that holds the lock of a run directory; None if there is none."""
    try:
        inode = (run_dir / ".lock").stat().st_ino
        locks = Path("/proc/locks").read_text()
    except OSError:
        return None
    found = re.search(rf" WRITE (\d+) \S+:{inode} ", locks)
    return None if found is None else int(found[1])


def printable(text: str) -> str:
    """Return a text from elsewhere for a terminal: control characters are escaped.

    Example: printable("\x1b[2J") == "\\x1b[2J"
    """
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


_LINE_ENDS = str.maketrans({"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})


def json_line(value: Any) -> str:
    """Return a value as JSON on one line, for any reader of lines; control characters are escaped.

    Python's and some clients' readers end a line at U+0085, U+2028 and U+2029, too. Raises
    ValueError for a number that is not finite.
    """
    return json.dumps(value, ensure_ascii=False, allow_nan=False).translate(_LINE_ENDS)


MAX_DEPTH = 100
"""Maximum nesting of lists and objects."""
MAX_DIGITS = 308
"""Maximum number of digits of an integer: a number of 308 digits fits a float."""


def parse_json(text: str | bytes, *, allow_nan: bool = False) -> Any:
    """Return the value of a JSON text; bytes are decoded as UTF-8.

    Raises JsonError for text that is not JSON, more than MAX_DEPTH levels, an integer of more than
    MAX_DIGITS digits, half a surrogate pair and, unless `allow_nan`, a number that is not finite.
    """
    constant = float if allow_nan else _refuse_constant
    try:
        text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        value = json.loads(text, parse_int=_integer, parse_constant=constant)
        json.dumps(value, ensure_ascii=False, allow_nan=allow_nan).encode()
    except UnicodeDecodeError as error:
        raise JsonError(f"not UTF-8 ({error.reason} at byte {error.start})") from error
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise JsonError(f"a string holds {half!a}, half of a surrogate pair") from error
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise JsonError(f"not valid JSON ({error.msg} at {where})") from error
    except RecursionError:
        raise JsonError(f"nested more than {MAX_DEPTH} deep: flatten it") from None
    except JsonError:
        raise
    except ValueError as error:  # 1e999
        raise JsonError(f"a number is too large: give at most {MAX_DIGITS} digits") from error
    if _is_deeper(value, MAX_DEPTH):
        raise JsonError(f"nested more than {MAX_DEPTH} deep: flatten it")
    return value


def find_surrogate(text: str) -> int | None:
    """Return the index of the first lone surrogate, which UTF-8 cannot encode; None without one.

    Example: find_surrogate("a\\ud83d") == 1, find_surrogate("abc") is None
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


def _integer(digits: str) -> int:
    if len(digits.lstrip("-")) > MAX_DIGITS:
        raise JsonError(f"an integer has more than {MAX_DIGITS} digits")
    return int(digits)


def _refuse_constant(name: str) -> NoReturn:
    raise JsonError(f"{name} is not a JSON number: give a finite number or null")


def _is_deeper(value: Any, levels: int) -> bool:
    children = value.values() if isinstance(value, dict) else value
    if not isinstance(value, dict | list):
        return False
    return levels == 0 or any(_is_deeper(child, levels - 1) for child in children)
