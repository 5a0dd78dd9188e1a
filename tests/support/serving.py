"""Servers over a tiny random model, and engines that wait or fail, for the tests of serving."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import httpx
import torch

from longtail.config.command_options import ServeOptions
from longtail.engine.engine import RolloutEngine
from longtail.engine.request import EngineLimits
from longtail.engine.speculation.speculator import Speculation
from longtail.generator import StepReport
from longtail.model.hf.tokenizer import Tokenizer
from longtail.serve.server import Routes
from longtail.serve.service import Service
from longtail.system.addresses import bind
from support.http_threads import running_in_thread
from support.tiny_models import tiny_model, tiny_tokenizer

NAME = "tiny"
OPTIONS = ServeOptions(model=NAME, max_running=4, max_queue=4, max_len=128, drain_s=5.0)
_TIMEOUT_S = 30.0


class HeldEngine(RolloutEngine):
    """An engine whose steps wait until its gate is open."""

    def hold(self) -> threading.Event:
        self._gate = threading.Event()
        return self._gate

    def step(self) -> StepReport:
        assert self._gate.wait(_TIMEOUT_S)
        return super().step()


class FailingEngine(RolloutEngine):
    """An engine that fails after three steps."""

    steps = 3

    def step(self) -> StepReport:
        self.steps -= 1
        if self.steps < 0:
            raise RuntimeError("the device failed")
        return super().step()


@cache
def shared_tokenizer() -> Tokenizer:
    return tiny_tokenizer()


def make_engine(
    kind: type[RolloutEngine] = RolloutEngine, speculation: Speculation | None = None
) -> RolloutEngine:
    limits = EngineLimits(
        max_running=OPTIONS.max_running, max_step_tokens=64, max_len=OPTIONS.max_len
    )
    model = tiny_model(dtype=torch.float64)
    return kind(model, shared_tokenizer().decode, limits, speculation=speculation)


def make_model_server(
    engine: RolloutEngine,
    options: ServeOptions = OPTIONS,
    open_drafters: Callable[[], Speculation | None] = lambda: None,
    api_key: str | None = None,
) -> Routes:
    return Routes(Service(engine, options), shared_tokenizer(), options, open_drafters, api_key)


@contextmanager
def live(server: Routes) -> Iterator[httpx.Client]:
    """Serve on a free port of this machine and yield a client of it."""
    with bind("127.0.0.1", 0) as sock:
        http, run = server.serving(sock)
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        with (
            running_in_thread(http, run),
            httpx.Client(base_url=url, timeout=_TIMEOUT_S, trust_env=False) as client,
        ):
            yield client


def is_free(engine: RolloutEngine) -> bool:
    """Return whether the engine holds no request and no KV."""
    usage = engine.kv_usage()
    return engine.num_unfinished == 0 and usage.free == usage.total
