"""Handles on other engines: a process for each, started once per model, idle while others run.

`peer_worker` is the program of that process; a foreign interpreter runs it by path.
"""

import json
import os
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, final

from longtail.errors import ConfigError

PeerT = TypeVar("PeerT", bound="PeerProcess")
PeerKind = Literal["generate", "vllm"]
_WORKER = Path(__file__).with_name("peer_worker.py")
_TIMEOUT_S = 900.0
"""Seconds in which a peer must load, and in which it must answer a turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSpec:
    """Arguments of `peer_worker`."""

    kind: PeerKind
    model_dir: str
    dtype: str
    threads: int
    max_len: int
    """Tokens of the longest prompt plus completion."""
    max_batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One batch generated, measured inside the peer's process.

    Example: Turn(seconds=1.2, cpu_seconds=1.2, num_tokens=512)
    """

    seconds: float
    cpu_seconds: float
    """CPU seconds of all threads; below `seconds` when something else had the core."""
    num_tokens: int


class PeerProcess:
    """A program in another process, by JSON lines. It inherits this process's CPU pinning.

    Lifecycle: started (loads, maybe compiles) -> ask* -> close, also by `with`.
    """

    def __init__(
        self, python: str, worker: Path, kind: str, spec: Mapping[str, Any], *, flag: str
    ) -> None:
        """Start it and wait until its model is loaded; a ConfigError shows its last output.

        `spec` has the number of `threads`; `flag` is the option that named the interpreter.
        """
        self._kind, self._python = kind, python
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (see close)
        threads = str(spec["threads"])
        limits = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        try:
            self._process = subprocess.Popen(
                # -I: neither this folder nor PYTHONPATH may shadow the peer's modules
                [python, "-I", str(worker), json.dumps(spec)],
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

    def __enter__(self: PeerT) -> PeerT:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> dict[str, Any]:
        """Wait for one line; kill a peer that does not answer in time."""
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
            f"the {self._kind} process ({self._python}) {what}; its last output:\n{last_lines}"
        )


@final
class Peer(PeerProcess):
    """A running engine."""

    def __init__(self, python: str, spec: PeerSpec) -> None:
        """Start it and wait until its model is loaded; a ConfigError shows its last output."""
        flag = f"--{spec.kind}-python"
        super().__init__(python, _WORKER, spec.kind, asdict(spec), flag=flag)

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Turn:
        """Write `new_tokens` tokens after each prompt."""
        prompts = [list(prompt) for prompt in prompts]
        done = Turn(**self.ask({"prompts": prompts, "new_tokens": new_tokens}))
        assert done.num_tokens == new_tokens * len(prompts), f"{self._kind} stopped early: {done}"
        return done
