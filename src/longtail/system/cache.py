"""What longtail makes once a machine and keeps for its user: kernels, warm starts, drafters.

    $LONGTAIL_CACHE, else $XDG_CACHE_HOME/longtail, else ~/.cache/longtail
      tiny-reasoner/                 a kind
        3f2a91c04d1be6a7/            an entry, named by the digest of whatever decides its content
          ...  manifest.json         its files, and their seal
        .new-x1y2/                   being made; renamed when it is whole

An entry is used only if every file of it is as it was written; a damaged one is made anew. Code and
weights in here are trusted, so what another user could have written is refused.
"""

import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from longtail.errors import ConfigError, LongtailError
from longtail.system.files import open_sealed, seal_folder, sync

_log = logging.getLogger("longtail")
_MANIFEST = "manifest.json"
_OTHERS_WRITE = 0o022


def cache_directory() -> Path:
    """Return $LONGTAIL_CACHE, else the user's cache directory; an empty variable is an unset one.

    Raises ConfigError for a user without a home.
    """
    try:
        if named := os.environ.get("LONGTAIL_CACHE"):
            return Path(named).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "longtail"
    except RuntimeError as error:
        raise ConfigError(
            f"there is no place for a cache ({error}): set LONGTAIL_CACHE to a folder of your own"
        ) from error


def build_once(
    kind: str, name: str, build: Callable[[Path], None], root: Path | str | None = None
) -> Path:
    """Return an entry, letting `build` fill a new folder first if it is not there whole.

    The entry lies under `root`, else in the user's cache. Of two processes that build at once, one
    result stays. Raises ConfigError where the cache cannot be written or is another user's.
    """
    base = cache_directory() if root is None else Path(root)
    try:
        place = _own(_own(base) / kind)
        return _entry(place / name, build)
    except LongtailError:
        raise
    except OSError as error:
        raise ConfigError(
            f"{base}: the cache cannot be written ({error}); free some space, or set "
            "LONGTAIL_CACHE to a folder of your own"
        ) from error


def _entry(final: Path, build: Callable[[Path], None]) -> Path:
    """Return an entry, making it beside its place if it is not there whole."""
    damage = _damage(final)
    if damage is None:
        return final
    if final.exists():
        _log.warning("%s is damaged, or of an earlier version; made anew: %s", final, damage)
    temporary = Path(tempfile.mkdtemp(prefix=".new-", dir=final.parent))
    try:
        build(temporary / "whole")
        seal_folder(temporary / "whole", _MANIFEST, {})
        try:
            if final.exists() and _damage(final):
                final.rename(temporary / "damaged")
            (temporary / "whole").rename(final)
        except OSError:
            if _damage(final):  # else another process was faster
                raise
        sync(final.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return final


def _own(folder: Path) -> Path:
    """Make a folder that only this user can write into, and return it."""
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


def _damage(entry: Path) -> str | None:
    """Say what is wrong with an entry, None if it is as written; ConfigError if another's."""
    try:
        for path in (entry, *entry.rglob("*")):
            _refuse_foreign(path)
        open_sealed(entry, _MANIFEST)
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        return str(error)
    return None
