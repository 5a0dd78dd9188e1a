"""The rival of `longtail bench serve`: `transformers serve` with the same weights and CPU."""

import os
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from socket import create_server

from longtail.bench.common.report import Spread, ratios
from longtail.bench.serve.measure import ON, Clients, Subject, Turn, calls
from longtail.bench.serve.options import Setting
from longtail.errors import ConfigError
from longtail.model.hf.model import save_model

_START_S = 120.0
_CALLS = 4
_PROGRAM = "from transformers.cli.transformers import main; main()"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """How the rival fared, or why it did not.

    Example: Rival(ratio=None, reason="... requires `accelerate`")
    """

    ratio: Spread | None
    """Its seconds a token, one greedy call at a time, over ours with drafts."""
    reason: str


def measure_peer(
    subject: Subject, setting: Setting, ports: dict[str, int], clients: Clients,
    say: Callable[[str], None],
) -> Rival:  # fmt: skip
    """Compare single calls, turn by turn; a rival that cannot be run says why."""
    if setting.peer_python is None:
        return Rival(ratio=None, reason="--peer-python none")
    with tempfile.TemporaryDirectory(prefix="longtail-peer-") as place:
        path = Path(place) / subject.name
        save_model(subject.model, path, eos_ids=subject.tokenizer.eos_ids)
        subject.tokenizer.save(path)
        try:
            with _peer(setting.peer_python, path, subject.dtype) as port:
                rival = _compare(subject, setting, {ON: ports[ON], "peer": port}, path, clients)
        except ConfigError as error:
            rival = Rival(ratio=None, reason=str(error))
    told = rival.reason if rival.ratio is None else f"{rival.ratio.text()} x our seconds a token"
    say(f"{subject.name}, transformers serve: {told}")
    return rival


def _compare(
    subject: Subject, setting: Setting, ports: dict[str, int], path: Path, clients: Clients
) -> Rival:
    asked = calls(subject, setting, 0.0, _CALLS, stream=False)
    of_peer = [{**call, "model": str(path)} for call in asked]
    turns: dict[str, list[Turn]] = {arm: [] for arm in ports}
    for number in range(1 + setting.repeats):
        for arm, port in ports.items():
            turn = clients.turn(port, 1, asked if arm == ON else of_peer)
            if number:
                turns[arm].append(turn)
    peer, own = ([turn.token_s for turn in turns[arm]] for arm in ("peer", ON))
    return Rival(ratio=ratios(peer, own), reason="")


@contextmanager
def _peer(python: str, path: Path, dtype: str) -> Iterator[int]:
    """Start it and wait until it answers; ConfigError with its last words if it does not."""
    with create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    words = ["serve", str(path), "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    offline = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(
            [python, "-c", _PROGRAM, *words, "--dtype", dtype],
            stdout=log,
            stderr=log,
            env={**os.environ, **offline},
        )
        try:
            deadline = time.monotonic() + _START_S
            while not _answers(port):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    words = log.read().strip().splitlines()[-1:]
                    raise ConfigError(f"transformers serve does not start: {' '.join(words)}")
                time.sleep(0.2)
            yield port
        finally:
            process.kill()
            process.wait()


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
            return True
    except (urllib.error.URLError, OSError):
        return False
