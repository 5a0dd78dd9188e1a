"""A trainer's weights for a running `longtail serve --rl-dir DIR`, through files in DIR.

    AsyncGRPOTrainer(..., weight_transfer=DirectoryTransfer("http://127.0.0.1:8000", "exchange"))

`DirectoryTransfer` has the methods of TRL's `WeightTransferProtocol` and needs no TRL. Server and
trainer read the same directory, so they run on one machine or share a file system.
"""

import hashlib
import json
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, final
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, Request, build_opener

from torch import Tensor

from longtail.errors import ConfigError, UnavailableError
from longtail.model.hf.weights import SINGLE_FILE, write_tensors

_POLL_S = 1.0
_HEALTH_S = 10.0


@final
class DirectoryTransfer:
    """Writes weights into a directory and has a server load them.

    `pause_mode` is that of `POST /pause`: "keep" begins unfinished texts anew under the new
    weights, "wait" finishes them first. The newest weights stay in `directory` until `destroy`.
    """

    def __init__(
        self,
        url: str,
        directory: Path | str,
        *,
        admin_token: str | None = None,
        pause_mode: str = "keep",
        timeout_s: float = 1800.0,
    ) -> None:
        """`timeout_s` bounds the wait for the server's start and for each of its answers."""
        self._url, self._directory = url.rstrip("/").removesuffix("/v1"), Path(directory)
        self._headers = {"Content-Type": "application/json"}
        if admin_token is not None:
            self._headers["Authorization"] = f"Bearer {admin_token}"
        self._pause_mode, self._timeout_s = pause_mode, timeout_s
        self._open = build_opener(ProxyHandler({})).open
        self._number = 0
        self.version: int | None = None
        """Version that the server gave to the newest weights; None before the first."""

    def init_weight_transfer(self) -> None:
        """Wait for the server, and check that it takes weights from a directory."""
        deadline = time.monotonic() + self._timeout_s
        while not self._is_healthy():
            if time.monotonic() > deadline:
                raise UnavailableError(f"{self._url} did not answer in {self._timeout_s:g} s")
            time.sleep(_POLL_S)
        self._post("/init_weight_transfer_engine", {"init_info": {"backend": "directory"}})

    def pause(self) -> None:
        """Stop the server's generation."""
        self._post(f"/pause?mode={self._pause_mode}", {})

    def send_weights(self, iterator: Iterable[tuple[str, Tensor]]) -> None:
        """Write all tensors, in Hugging Face's names, and have the server load them."""
        self._number += 1
        place = self._place(self._number)
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        write_tensors(dict(iterator), place)
        with (place / SINGLE_FILE).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        update = {"directory": place.name, "sha256": {SINGLE_FILE: digest}}
        self.version = self._post("/update_weights", {"update_info": update})["policy_version"]
        shutil.rmtree(self._place(self._number - 1), ignore_errors=True)

    def resume(self) -> None:
        """Resume the server's generation."""
        self._post("/resume", {})

    def destroy(self) -> None:
        """Remove the weights."""
        shutil.rmtree(self._place(self._number), ignore_errors=True)

    def _place(self, number: int) -> Path:
        return self._directory / f"update-{number}"

    def _is_healthy(self) -> bool:
        try:
            with self._open(f"{self._url}/health", timeout=_HEALTH_S) as answer:
                return answer.status == 200
        except OSError:  # not there yet, or it answers 503
            return False

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the server's answer. Raises ConfigError for a refusal, with its reason."""
        request = Request(self._url + path, json.dumps(body).encode(), self._headers)
        try:
            with self._open(request, timeout=self._timeout_s) as answer:
                return json.load(answer)
        except HTTPError as error:
            reason = error.read().decode(errors="replace")[:500]
            raise ConfigError(f"{self._url}{path} answered {error.code}: {reason}") from error
        except (URLError, TimeoutError) as error:
            raise UnavailableError(f"{self._url}{path}: no answer ({error})") from error
