"""A Ray instance of our own: on loopback only, behind a random token, in a temporary folder.

    longtail-ray-XXXXXXXX/       0700, removed at the end
        lock                     locked while the folder is in use
        token                    0600: shared by the processes of this Ray
        team-1, team-2, ...      rendezvous files of the learners
        ray/                     sockets and logs of Ray

Ray holds the authentication mode, the token and this machine's address per process, and offers no
other way to set them than the environment and its own modules. All of that is done here.
"""

import fcntl
import logging
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import final

import ray
from ray._private import ray_constants
from ray._private import worker as ray_worker
from ray._raylet import (  # type: ignore[attr-defined]  # compiled
    AuthenticationTokenLoader,
    Config,
    GcsClient,
)
from ray.exceptions import RayError

STORE_BYTES = 512 * 2**20
_LONGEST_PLACE = 16
_REAPER = Path(__file__).with_name("reaper.py")
_PREFIX, _NEW = "longtail-ray-", "longtail-new-"
_RAYS_OWN_LINE = re.compile(r":\w+:|\[20\d\d-\d\d-\d\d |\[\w+ [EWIF] |\s*@ +0x")
"""Lines that Ray itself writes into the logs of its workers."""


@final
class OwnRay:
    """Starts Ray when constructed, and stops it in `close`; one at a time in a process."""

    def __init__(self, num_cpus: int) -> None:
        _sweep()
        new = Path(tempfile.mkdtemp(prefix=_NEW, dir=_place()))
        self._lock = _locked(new / "lock")
        # Other processes sweep folders with this name, so the lock is taken before.
        self.folder = new.rename(new.with_name(new.name.replace(_NEW, _PREFIX)))
        self._read: dict[Path, int] = {}
        """Number of bytes read from each worker's log."""
        self._num_teams = 0
        token = self.folder / "token"
        with open(os.open(token, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
        self._reaper = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_REAPER), str(self.folder)],
            stdin=subprocess.PIPE,  # closed when this process ends in any way
            start_new_session=True,
        )
        self._before = _environment(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(token))
        self._addresses = ray_constants.ENABLE_RAY_CLUSTER
        # When this is off, Ray takes 127.0.0.1 for this machine's address, and all of its processes
        # listen on loopback only.
        ray_constants.ENABLE_RAY_CLUSTER = False
        try:
            with quietly():
                ray.init(
                    address="local",
                    num_cpus=num_cpus,
                    include_dashboard=False,
                    logging_level=logging.ERROR,
                    log_to_driver=False,
                    object_store_memory=STORE_BYTES,
                    _temp_dir=str(self.folder / "ray"),
                )
        except BaseException:
            self.close()
            raise

    def meeting_point(self) -> str:
        """Return the URL of a new file for the learners' rendezvous."""
        self._num_teams += 1
        return f"file://{self.folder}/team-{self._num_teams}"

    def read_new_lines(self) -> Iterator[str]:
        """Yield the lines that workers have printed since the last call."""
        for path in sorted(self.folder.glob("ray/session_2*/logs/worker-*.err")):
            with open(path, "rb") as file:
                file.seek(self._read.get(path, 0))
                whole = file.read().rpartition(b"\n")[0]
            self._read[path] = self._read.get(path, 0) + len(whole) + bool(whole)
            for line in whole.decode(errors="replace").splitlines():
                if line and not _RAYS_OWN_LINE.match(line):
                    yield line

    def close(self) -> None:
        """Stop Ray, remove its folder, and restore the environment."""
        ray.shutdown()
        ray_constants.ENABLE_RAY_CLUSTER = self._addresses
        _environment(**self._before)
        self._reaper.kill()
        self._reaper.communicate()
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)


@contextmanager
def quietly() -> Iterator[None]:
    """Start or reach Ray in this context: Ray keeps no signal handler and prints nothing, ever.

    SIGTERM raises KeyboardInterrupt meanwhile, and is handled as before afterwards. Ray would print
    the losses of workers, which the pool reports itself.
    """
    ray_worker.print_to_stdstream = lambda *_, **__: None
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit as error:  # Ray's answer to SIGTERM
        raise KeyboardInterrupt from error
    finally:
        if is_main:
            signal.signal(signal.SIGTERM, before)


def check_is_ray(address: str, timeout_s: float) -> None:
    """Check that a Ray that accepts this process's token answers at an address.

    Raises ConnectionError, or Ray's own error. Ray itself would try for minutes.
    """
    found: list[RayError | None] = []

    def ask() -> None:
        try:
            GcsClient(address=address.removeprefix("ray://"))
            found.append(None)
        except RayError as error:
            found.append(error)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(timeout_s)
    if not found:
        raise ConnectionError(f"no word of Ray's came for {timeout_s:.0f} s")
    if found[0] is not None:
        raise found[0]


def _environment(
    *,
    RAY_AUTH_MODE: str | None,  # noqa: N803
    RAY_AUTH_TOKEN_PATH: str | None,  # noqa: N803
    RAY_AUTH_TOKEN: str | None = None,  # noqa: N803
) -> dict[str, str | None]:
    """Set the authentication of Ray processes, including this one; return the earlier values."""
    wanted = {
        "RAY_AUTH_MODE": RAY_AUTH_MODE,
        "RAY_AUTH_TOKEN_PATH": RAY_AUTH_TOKEN_PATH,
        "RAY_AUTH_TOKEN": RAY_AUTH_TOKEN,
    }
    before = {name: os.environ.pop(name, None) for name in wanted}
    os.environ.update({name: value for name, value in wanted.items() if value is not None})
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
    return before


def _place() -> Path:
    """Return the parent of our folders: the paths of Ray's sockets have at most 107 bytes."""
    place = tempfile.gettempdir()
    return Path(place if len(place) <= _LONGEST_PLACE else "/tmp")


def _locked(path: Path) -> int:
    """Lock a file until this process ends. Raises OSError if another process has locked it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _sweep() -> None:
    """Remove the folders that killed processes of this user left."""
    for folder in _place().glob(f"{_PREFIX}*"):
        try:
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            os.close(_locked(folder / "lock"))
        except OSError:  # in use, or just removed
            continue
        shutil.rmtree(folder, ignore_errors=True)
