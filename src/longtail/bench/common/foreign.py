"""A program in the interpreter of another environment, driven by JSON lines."""

import json
import os
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from longtail.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program for a foreign interpreter.

    Example: Program(name="vllm", path=Path("worker.py"), argument={"depth": 4}, threads=1)
    """

    name: str
    """Name of what the environment must have, for messages."""
    path: Path
    argument: Mapping[str, Any]
    threads: int
    timeout_s: float = 900.0
    """Seconds in which it must load, and in which it must answer a message."""


@final
class ForeignProcess:
    """A running program. It inherits this process's CPU pinning, so pin before starting it.

    Lifecycle: started -> read, ask* -> close, also by `with`.
    """

    def __init__(self, python: str, program: Program, flag: str) -> None:
        """Start it; ConfigError names the option `flag` if the interpreter cannot be started."""
        self._python, self._program = python, program
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (see close)
        threads = str(program.threads)
        limits = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        try:
            self._process = subprocess.Popen(
                # -I: neither this folder nor PYTHONPATH may shadow the environment's modules
                [python, "-I", str(program.path), json.dumps(program.argument)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                env={**os.environ, **limits, **offline},
            )
        except OSError as error:
            self._log.close()
            raise ConfigError(
                f"{flag} = {python!r} cannot be started ({error}); name the python of an "
                f"environment that has {program.name}"
            ) from error

    def ask(self, message: Mapping[str, Any]) -> Any:
        """Send a message and return the answer; ConfigError with its last output if it ends."""
        assert self._process.stdin is not None
        try:
            print(json.dumps(message), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise self._failure("died") from None
        return self.read()

    def read(self) -> Any:
        """Wait for one line; kill a program that does not answer in time."""
        assert self._process.stdout is not None
        deadline = threading.Timer(self._program.timeout_s, self._process.kill)
        deadline.start()
        try:
            line = self._process.stdout.readline()
        finally:
            deadline.cancel()
        if not line:
            self._process.wait()
            raise self._failure(f"ended with exit code {self._process.returncode}")
        return json.loads(line)

    def close(self) -> None:
        """Wait for the process to end; kill it if it does not."""
        try:
            self._process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
        self._log.close()

    def __enter__(self) -> "ForeignProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _failure(self, what: str) -> ConfigError:
        self._log.seek(0)
        last_lines = "\n".join(self._log.read().splitlines()[-12:])
        return ConfigError(
            f"the {self._program.name} process ({self._python}) {what}; its last output:\n"
            f"{last_lines}"
        )
