"""The comparison of `longtail bench serve` with `transformers serve`: same weights, same CPU."""

import os
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from socket import create_server

from longtail.bench.common.process import Log
from longtail.bench.common.timing import Spread, paired, ratios
from longtail.bench.serve.measure import ON, Clients, ServedModel
from longtail.bench.serve.options import ServeBenchOptions
from longtail.errors import ConfigError
from longtail.model.hf.model import save_model

_START_S = 120.0
_CALLS = 4
_PROGRAM = "from transformers.cli.transformers import main; main()"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """Result of the comparison, or the reason why there is none.

    Example: Rival(ratio=None, reason="... requires `accelerate`")
    """

    ratio: Spread | None
    """Its seconds per token, one greedy call at a time, over longtail's with drafts."""
    reason: str


def measure_peer(
    served: ServedModel,
    options: ServeBenchOptions,
    ports: Mapping[str, int],
    clients: Clients,
    log: Log,
) -> Rival:
    """Compare single calls, turn by turn."""
    if options.peer_python == "none":
        return Rival(ratio=None, reason="--peer-python none")
    calls = served.calls(0.0, options.tokens, _CALLS, stream=False)
    with tempfile.TemporaryDirectory(prefix="longtail-peer-") as place:
        path = Path(place) / served.name
        save_model(served.model, path, eos_ids=served.tokenizer.eos_ids)
        served.tokenizer.save(path)
        peer_calls = [{**call, "model": str(path)} for call in calls]
        try:
            with serving(options.peer_python, path, served.dtype) as port:
                seconds = paired(
                    {
                        ON: lambda: clients.turn(ports[ON], 1, calls).token_s,
                        "peer": lambda: clients.turn(port, 1, peer_calls).token_s,
                    },
                    repeats=options.repeats,
                )
        except ConfigError as error:
            log(f"{served.name}, transformers serve: {error}")
            return Rival(ratio=None, reason=str(error))
    ratio = ratios(seconds["peer"], seconds[ON])
    log(f"{served.name}, transformers serve: {ratio.text()} x longtail's seconds per token")
    return Rival(ratio=ratio, reason="")


@contextmanager
def serving(python: str, path: Path, dtype: str) -> Iterator[int]:
    """Run `transformers serve` and yield its port; a ConfigError shows its last output."""
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
            while not _is_healthy(port):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    last_line = "".join(log.read().strip().splitlines()[-1:])
                    raise ConfigError(f"transformers serve does not start: {last_line}")
                time.sleep(0.2)
            yield port
        finally:
            process.kill()
            process.wait()


def _is_healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
            return True
    except (urllib.error.URLError, OSError):
        return False
