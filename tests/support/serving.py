"""Services over a tiny random model, and engines that fail, for the tests of serving."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import httpx
import torch

from longtail.assembly.drafters import Target
from longtail.engine.engine import RolloutEngine
from longtail.engine.kv.cache import KVUsage
from longtail.engine.limits import EngineLimits
from longtail.engine.report import StepReport
from longtail.engine.speculation.speculator import Speculation
from longtail.model.hf.tokenizer import Tokenizer
from longtail.serve.middleware import Access
from longtail.serve.options import Limits
from longtail.serve.server import ModelServer, make_server, running
from longtail.serve.service import Service
from longtail.serve.updates import ModelUpdates
from support.tiny_models import tiny_model, tiny_tokenizer

LIMITS = Limits(
    max_running=4,
    max_queue=4,
    max_len=128,
    max_tokens=100,
    max_choices=4,
    max_body_kb=4,
    body_s=2.0,
)
NAME = "tiny"
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


class PoisonedEngine(RolloutEngine):
    """An engine that fails while it runs a prompt that begins with the token `poison`."""

    poison = 66

    def step(self) -> StepReport:
        report = super().step()
        for name, tokens, _ in self.unfinished():
            if name in self.running() and tokens[0] == self.poison:
                raise RuntimeError("the device failed")
        return report


class SlowlyCountedEngine(RolloutEngine):
    """An engine whose `kv_usage` takes 50 ms."""

    def kv_usage(self) -> KVUsage:
        time.sleep(0.05)
        return super().kv_usage()


@cache
def shared_tokenizer() -> Tokenizer:
    return tiny_tokenizer()


def make_engine(
    kind: type[RolloutEngine] = RolloutEngine,
    limits: Limits = LIMITS,
    speculation: Speculation | None = None,
    dtype: torch.dtype = torch.float64,
) -> RolloutEngine:
    engine_limits = EngineLimits(
        max_running=limits.max_running, max_step_tokens=64, max_len=limits.max_len
    )
    return kind(
        tiny_model(dtype=dtype), shared_tokenizer().decode, engine_limits, speculation=speculation
    )


def make_service(
    engine: RolloutEngine, limits: Limits = LIMITS, *, then: Sequence[RolloutEngine] = ()
) -> Service:
    """Return a service of an engine and, after each failure, of the next one in `then`."""
    engines = iter((engine, *then))
    return Service(lambda: next(engines), shared_tokenizer().decode, limits)


def make_model_server(
    engine: RolloutEngine,
    limits: Limits = LIMITS,
    api_key: str | None = None,
    *,
    then: Sequence[RolloutEngine] = (),
    rl_dir: Path | None = None,
    admin_token: str | None = None,
) -> ModelServer:
    engines = iter((engine, *then))
    access = Access(limits=limits, api_key=api_key, admin_token=admin_token)
    updates = None
    if rl_dir is not None:
        target = Target(
            model=engine.model, tokenizer=shared_tokenizer(), directory=rl_dir, name=NAME
        )
        updates = ModelUpdates(rl_dir, target, "none")
    return make_server(
        lambda: next(engines), shared_tokenizer(), access, name=NAME, updates=updates
    )


@contextmanager
def live(server: ModelServer, **options: object) -> Iterator[httpx.Client]:
    """Serve on a free port of this machine and yield a client of it."""
    with (
        running(server) as port,
        httpx.Client(
            base_url=f"http://127.0.0.1:{port}", timeout=_TIMEOUT_S, trust_env=False, **options
        ) as client,
    ):
        yield client


def is_free(engine: RolloutEngine) -> bool:
    """Return whether the engine holds no request and no KV."""
    usage = engine.kv_usage()
    return engine.num_unfinished == 0 and usage.free == usage.total
