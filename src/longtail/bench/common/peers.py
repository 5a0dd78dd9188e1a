"""Handles on other engines: a process for each, started once per model, idle while others run.

`peer_worker` is the program of that process; a foreign interpreter runs it by path.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, final

from longtail.bench.common.foreign import ForeignProcess, Program

PeerKind = Literal["generate", "vllm"]
_WORKER = Path(__file__).with_name("peer_worker.py")


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


@final
class Peer:
    """A running peer. It inherits this process's CPU pinning, so pin before starting it.

    Lifecycle: started (loads, maybe compiles) -> generate* -> close, also by `with`.
    """

    def __init__(self, python: str, spec: PeerSpec) -> None:
        """Start it and wait until its model is loaded; a ConfigError shows its last output."""
        self._kind = spec.kind
        program = Program(name=spec.kind, path=_WORKER, argument=asdict(spec), threads=spec.threads)
        self._process = ForeignProcess(python, program, f"--{spec.kind}-python")
        try:
            self.description: str = self._process.read()["ready"]
        except BaseException:
            self.close()
            raise

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Turn:
        """Write `new_tokens` tokens after each prompt."""
        turn = {"prompts": [list(prompt) for prompt in prompts], "new_tokens": new_tokens}
        done = Turn(**self._process.ask(turn))
        assert done.num_tokens == new_tokens * len(prompts), f"{self._kind} stopped early: {done}"
        return done

    def close(self) -> None:
        """Wait for the process to end; kill it if it does not."""
        self._process.close()

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
