"""A Ray of our own: on loopback only, behind a random token, in a folder that goes with it.

    longtail-ray-XXXXXXXX/       0700, removed at the end
        lock                     held as long as the folder is in use
        token                    0600: what processes of this Ray show to each other
        team-1, team-2, ...      where learners meet
        ray/                     Ray's sockets and logs

Ray keeps the mode of authentication, the token and this machine's address for a whole process, and
offers no other way to set them than the environment and its own modules. All of that is done here.
"""

import fcntl
import logging
import os
import re
import secrets
import shutil
import signal
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
_PREFIX, _NEW = "longtail-ray-", "longtail-new-"
_RAYS_OWN_LINE = re.compile(r":\w+:|\[20\d\d-\d\d-\d\d |\[\w+ [EWIF] |\s*@ +0x")
"""What Ray itself writes into the logs of its workers."""


@final
class OwnRay:
    """One at a time in a process. Lifecycle: constructing begins it, `close` ends it."""

    def __init__(self, num_cpus: int) -> None:
        _sweep()
        new = Path(tempfile.mkdtemp(prefix=_NEW, dir=_place()))
        self._lock = _locked(new / "lock")
        # Only now has it a name that other processes sweep.
        self.folder = new.rename(new.with_name(new.name.replace(_NEW, _PREFIX)))
        self._read: dict[Path, int] = {}
        """By log of a worker, the bytes that were read."""
        self._num_teams = 0
        token = self.folder / "token"
        with open(os.open(token, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
        self._before = _environment(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(token))
        self._addresses = ray_constants.ENABLE_RAY_CLUSTER
        # Where it is off, as on other systems by default, Ray takes 127.0.0.1 for this machine's
        # address, and all of its processes listen there only.
        ray_constants.ENABLE_RAY_CLUSTER = False
        try:
            with discreetly():
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

    def lines(self) -> Iterator[str]:
        """Hand out what the workers have printed since the last time."""
        for path in sorted(self.folder.glob("ray/session_2*/logs/worker-*.err")):
            with open(path, "rb") as file:
                file.seek(self._read.get(path, 0))
                whole = file.read().rpartition(b"\n")[0]
            self._read[path] = self._read.get(path, 0) + len(whole) + bool(whole)
            for line in whole.decode(errors="replace").splitlines():
                if line and not _RAYS_OWN_LINE.match(line):
                    yield line

    def close(self) -> None:
        """End Ray and remove its folder; the environment is what it was."""
        ray.shutdown()
        ray_constants.ENABLE_RAY_CLUSTER = self._addresses
        _environment(**self._before)
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)


@contextmanager
def discreetly() -> Iterator[None]:
    """Let Ray be begun or reached: it takes no signal for good and prints nothing, then or later.

    SIGTERM is Ctrl-C meanwhile, afterwards what it was. What Ray prints is about lost workers: the
    pool reports those itself.
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


def check_is_ray(address: str, patience_s: float) -> None:
    """See that what answers at an address is a Ray that takes this process's token.

    Raises ConnectionError, or what Ray says against it. Ray itself would try for minutes.
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
    asking.join(patience_s)
    if not found:
        raise ConnectionError(f"no word of Ray's came for {patience_s:.0f} s")
    if found[0] is not None:
        raise found[0]


def _environment(
    *,
    RAY_AUTH_MODE: str | None,  # noqa: N803
    RAY_AUTH_TOKEN_PATH: str | None,  # noqa: N803
    RAY_AUTH_TOKEN: str | None = None,  # noqa: N803
) -> dict[str, str | None]:
    """Set how processes of Ray authenticate, this one included; return how they did."""
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
    """Return where folders are made: what Ray's sockets are named may have 107 letters in all."""
    place = tempfile.gettempdir()
    return Path(place if len(place) <= _LONGEST_PLACE else "/tmp")


def _locked(path: Path) -> int:
    """Open a file and lock it, as long as this process lives. Raises OSError if another has it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _sweep() -> None:
    """Remove the folders of processes of this user that were killed."""
    for folder in _place().glob(f"{_PREFIX}*"):
        try:
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            os.close(_locked(folder / "lock"))
        except OSError:  # in use, or just removed
            continue
        shutil.rmtree(folder, ignore_errors=True)
