"""Handles on rival engines: a process each, started once a model, idle while others run.

What a rival does is `peer_worker`'s business, which a foreign interpreter runs by path. Here are
starting, asking, and saying why it failed.
"""

import contextlib
import json
import os
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, final

from longtail.errors import ConfigError

PeerKind = Literal["generate", "vllm"]

_WORKER = Path(__file__).with_name("peer_worker.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSetting:
    """What a rival is started with.

    Example: PeerSetting(kind="vllm", python="/opt/vllm/bin/python", model_dir=Path("m"),
                         dtype="bfloat16", threads=1, max_len=528, max_batch=32)
    """

    kind: PeerKind
    python: str
    """Interpreter of an environment that has the rival."""
    model_dir: Path
    dtype: str
    threads: int
    max_len: int
    """Longest prompt plus completion, tokens."""
    max_batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One batch generated, measured inside the rival's process.

    Example: Turn(seconds=1.2, cpu_seconds=1.2, num_tokens=512)
    """

    seconds: float
    cpu_seconds: float
    """Of all threads; below `seconds` when something else had the core."""
    num_tokens: int


@final
class Peer:
    """A running rival. It inherits this process's CPU pinning, so pin before starting it.

    Lifecycle: started (loads, maybe compiles) -> generate* -> close, also by `with`.
    """

    def __init__(
        self, setting: PeerSetting, *, start_timeout_s: float = 900.0, turn_timeout_s: float = 900.0
    ) -> None:
        """Start it and wait until its model is loaded; ConfigError with its last words if not."""
        self._kind, self._python = setting.kind, setting.python
        self._turn_timeout_s = turn_timeout_s
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (see close)
        words = (setting.kind, str(setting.model_dir), setting.dtype)
        numbers = (setting.threads, setting.max_len, setting.max_batch)
        threads = str(setting.threads)
        offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        try:
            self._process = subprocess.Popen(
                # -I: neither this folder nor PYTHONPATH may shadow the rival's modules
                [setting.python, "-I", str(_WORKER), *words, *map(str, numbers)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                text=True,
                env=dict(os.environ, OMP_NUM_THREADS=threads, MKL_NUM_THREADS=threads, **offline),
            )
        except OSError as error:
            self._log.close()
            raise ConfigError(
                f"--{setting.kind}-python = {setting.python!r} cannot be started ({error}); name "
                "the python of an environment that has it"
            ) from error
        try:
            self.description: str = self._read(start_timeout_s)["ready"]
        except BaseException:
            self.close()
            raise

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Turn:
        """Write `new_tokens` tokens after each prompt."""
        assert self._process.stdin is not None
        turn = {"prompts": [list(prompt) for prompt in prompts], "new_tokens": new_tokens}
        try:
            print(json.dumps(turn), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise self._failure("died") from None
        done = Turn(**self._read(self._turn_timeout_s))
        assert done.num_tokens == new_tokens * len(prompts), f"{self._kind} stopped early: {done}"
        return done

    def close(self) -> None:
        """Let the process end; kill it if it does not."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def __enter__(self) -> "Peer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _read(self, timeout_s: float) -> dict[str, Any]:
        """Wait for one line; a rival that says nothing for too long is killed."""
        assert self._process.stdout is not None
        deadline = threading.Timer(timeout_s, self._process.kill)
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
        last_words = "\n".join(self._log.read().splitlines()[-12:])
        return ConfigError(
            f"the {self._kind} process ({self._python}) {what}; its last words:\n{last_words}"
        )
