"""A Ray instance of our own: on loopback only, behind a random token, in a temporary folder.

    longtail-ray-XXXXXXXX/       0700, removed at the end
        token                    0600: shared by the processes of this Ray
        team-1, team-2, ...      rendezvous files of the learners
        ray/                     sockets and logs of Ray

Nothing outlives this process: `reaper.py` ends all of this Ray when its owner ends in any way.
"""

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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import final

import ray
from ray._private import ray_constants
from ray._private import worker as ray_worker
from ray._raylet import (  # type: ignore[attr-defined]  # compiled
    AuthenticationTokenLoader,
    Config,
)

STORE_BYTES = 512 * 2**20
_LONGEST_PLACE = 16
"""Longest parent of the folder: the paths of Ray's sockets have at most 107 bytes."""
_REAPER = Path(__file__).with_name("reaper.py")
_RAYS_OWN_LINE = re.compile(r":\w+:|\[20\d\d-\d\d-\d\d |\[\w+ [EWIF] |\s*@ +0x")
"""Lines that Ray itself writes into the logs of its workers."""


@final
class OwnRay:
    """Starts Ray when constructed, and stops it in `close`; one at a time in a process."""

    def __init__(self, num_cpus: int) -> None:
        place = tempfile.gettempdir()
        place = place if len(place) <= _LONGEST_PLACE else "/tmp"
        self.folder = Path(tempfile.mkdtemp(prefix="longtail-ray-", dir=place))
        self._read: dict[Path, int] = {}
        """Number of bytes read from each worker's log."""
        token = self.folder / "token"
        with open(os.open(token, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
        self._reaper = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_REAPER), str(self.folder)],
            stdin=subprocess.PIPE,  # closed when this process ends in any way
            start_new_session=True,
        )
        own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "RAY_AUTH_TOKEN": None}
        self._before = _environment(own)
        # Off, Ray takes 127.0.0.1 for this machine's address, and listens on loopback only.
        self._addresses, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
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

    def hush(self) -> None:
        """Keep the reaper silent: the reason of the end is said."""
        assert self._reaper.stdin is not None
        self._reaper.stdin.write(b".")
        self._reaper.stdin.flush()

    def close(self) -> None:
        """Stop Ray, remove its folder, and restore the environment."""
        ray.shutdown()
        ray_constants.ENABLE_RAY_CLUSTER = self._addresses
        _environment(self._before)
        self._reaper.kill()
        self._reaper.communicate()
        shutil.rmtree(self.folder, ignore_errors=True)


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


def _environment(wanted: Mapping[str, str | None]) -> dict[str, str | None]:
    """Set variables of Ray's authentication, for this process, too; return the earlier values."""
    before = {name: os.environ.pop(name, None) for name in wanted}
    os.environ.update({name: value for name, value in wanted.items() if value is not None})
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
    return before
