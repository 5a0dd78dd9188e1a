"""vLLM in a process of its own (`vllm_worker`), idle while others run."""

import json
import os
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longtail.errors import ConfigError

_WORKER = Path(__file__).with_name("vllm_worker.py")
_TIMEOUT_S = 900.0
"""Seconds in which vLLM must load, and in which it must answer a turn."""


class VllmProcess:
    """vLLM in another process, by JSON lines. It inherits this process's CPU pinning.

    Lifecycle: started (loads, maybe compiles) -> ask* -> close, also by `with`.
    """

    def __init__(self, python: str, spec: Mapping[str, Any], *, flag: str) -> None:
        """Start it and wait until its model is loaded; a ConfigError shows its last output.

        `flag` is the option that named the interpreter.
        """
        self._python = python
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (see close)
        threads = str(spec["threads"])
        limits = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        try:
            self._process = subprocess.Popen(
                # -I: neither this folder nor PYTHONPATH may shadow vLLM's modules
                [python, "-I", str(_WORKER), json.dumps(spec)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                env={**os.environ, **limits, **offline},
            )
        except OSError as error:
            self._log.close()
            raise ConfigError(
                f"{flag} = {python!r} cannot be started ({error}); name the python "
                "of an environment that has it"
            ) from error
        try:
            self.description: str = self._read()["ready"]
        except BaseException:
            self.close()
            raise

    def ask(self, turn: Mapping[str, Any]) -> dict[str, Any]:
        """Send one turn and return its answer."""
        assert self._process.stdin is not None
        try:
            print(json.dumps(turn), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise self._failure("died") from None
        return self._read()

    def close(self) -> None:
        """Wait for the process to end; kill it if it does not."""
        try:
            self._process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
        self._log.close()

    def __enter__(self) -> "VllmProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> dict[str, Any]:
        """Wait for one line; kill a process that does not answer in time."""
        assert self._process.stdout is not None
        deadline = threading.Timer(_TIMEOUT_S, self._process.kill)
        deadline.start()
        try:
            line = self._process.stdout.readline()
        finally:
            deadline.cancel()
        if not line:
            self._process.wait()
            raise self._failure(f"ended with exit code {self._process.returncode}")
        return json.loads(line)

    def _failure(self, what: str) -> ConfigError:
        self._log.seek(0)
        last_lines = "\n".join(self._log.read().splitlines()[-12:])
        return ConfigError(
            f"the vllm process ({self._python}) {what}; its last output:\n{last_lines}"
        )
