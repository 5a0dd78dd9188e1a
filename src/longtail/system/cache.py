"""The user's cache of things that are built once per machine, such as kernels.

    $LONGTAIL_CACHE, else $XDG_CACHE_HOME/longtail, else ~/.cache/longtail
      kernels/                       a kind
        3f2a91c04d1be6a7/            an entry, named by the digest of its inputs
          SHA256SUMS                 digests of its files, which are checked at each use
        .new-x1y2/                   being built; synced and renamed when it is complete

Code and weights in the cache are trusted, so files that another user could have written are
refused, and an entry with a damaged file is built anew.
"""

import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from longtail.errors import ConfigError, LongtailError
from longtail.system.files import remove_folder, sha256, sync, sync_folder

_log = logging.getLogger("longtail")
_OTHERS_WRITE = 0o022
_SUMS = "SHA256SUMS"


def cache_directory() -> Path:
    """Return $LONGTAIL_CACHE, else the user's cache directory; an empty variable counts as unset.

    Raises ConfigError for a user without a home directory.
    """
    try:
        if named := os.environ.get("LONGTAIL_CACHE"):
            return Path(named).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "longtail"
    except RuntimeError as error:
        raise ConfigError(
            f"there is no place for a cache ({error}): set LONGTAIL_CACHE to a folder of your own"
        ) from error


def build_once(kind: str, name: str, build: Callable[[Path], None], *, announce: str = "") -> Path:
    """Return the folder of an entry, which `build` makes if it is missing or damaged.

    A process waits for another that builds the same entry; where files cannot be locked both build,
    and one result is kept. The line `announce` is logged before a build. Raises ConfigError if the
    cache cannot be written or belongs to another user.
    """
    base = cache_directory()
    try:
        final = _own(_own(base) / kind) / name
        if not _is_whole(final):
            with _alone(final):
                _build(final, build, announce)
        for path in (final, *final.rglob("*")):
            _refuse_foreign(path)
        return final
    except LongtailError:
        raise
    except OSError as error:
        raise ConfigError(
            f"{base}: the cache cannot be written ({error}); free some space, or set "
            "LONGTAIL_CACHE to a folder of your own"
        ) from error


def _build(final: Path, build: Callable[[Path], None], announce: str) -> None:
    """Build an entry in a temporary folder, sync it and rename it."""
    if _is_whole(final):  # another process has built it meanwhile
        return
    if final.exists():
        _log.warning("%s is damaged, or an earlier version's: it is built anew", final)
        remove_folder(final)
    if announce:
        _log.warning("%s", announce)
    temporary = Path(tempfile.mkdtemp(prefix=".new-", dir=final.parent))
    try:
        complete = temporary / "complete"
        build(complete)
        (complete / _SUMS).write_text(_sums(complete), encoding="utf-8")
        sync_folder(complete)
        try:
            complete.rename(final)
        except OSError:
            if not final.exists():  # otherwise another process was faster
                raise
        sync(final.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _is_whole(entry: Path) -> bool:
    """Return whether an entry is there, with the files that it was built with."""
    try:
        return (entry / _SUMS).read_bytes() == _sums(entry).encode()
    except FileNotFoundError:
        return False


def _sums(entry: Path) -> str:
    """Return the digests of the files of an entry, as `sha256sum` prints them."""
    files = sorted(path for path in entry.rglob("*") if path.is_file() and path.name != _SUMS)
    return "".join(f"{sha256(path)}  {path.relative_to(entry)}\n" for path in files)


@contextmanager
def _alone(final: Path) -> Iterator[None]:
    """Wait until no other process builds an entry."""
    path = final.parent / f".lock-{final.name}"
    with path.open("a") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _log.warning("waiting for another process that builds %s", final)
            fcntl.lockf(file, fcntl.LOCK_EX)
        except OSError:
            _log.warning("%s is built without a lock, which its file system lacks", final)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _own(folder: Path) -> Path:
    """Make a folder that only this user can write to, and return it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _refuse_foreign(folder)
    mode = folder.stat().st_mode
    if mode & _OTHERS_WRITE:
        folder.chmod(mode & ~_OTHERS_WRITE)
    return folder


def _refuse_foreign(path: Path) -> None:
    owner = path.stat().st_uid
    if owner != os.getuid():
        raise ConfigError(
            f"{path}: it belongs to another user (uid {owner}), and code and weights in it would "
            "be trusted; remove it, or set LONGTAIL_CACHE to a folder of your own"
        )
