"""Services over a tiny random model, and engines that misbehave, for the tests of serving."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import httpx
import torch

from longtail.engine.engine import RolloutEngine
from longtail.engine.kv.cache import KVUsage
from longtail.engine.limits import EngineLimits
from longtail.engine.report import StepReport
from longtail.engine.speculation.speculator import Speculation
from longtail.model.hf.tokenizer import Tokenizer
from longtail.serve.metrics import ServeMetrics
from longtail.serve.options import Limits
from longtail.serve.server import Served, front, running
from longtail.serve.service import Service
from support.tiny_models import tiny_model, tiny_tokenizer

LIMITS = Limits(
    max_running=4,
    max_queue=4,
    max_len=128,
    max_tokens=100,
    max_choices=4,
    max_body=4096,
    body_s=2.0,
)
NAME = "tiny"
_TIMEOUT_S = 30.0


class HeldEngine(RolloutEngine):
    """Makes a step only while its gate is open."""

    def hold(self) -> threading.Event:
        self._gate = threading.Event()
        return self._gate

    def step(self) -> StepReport:
        assert self._gate.wait(_TIMEOUT_S)
        return super().step()


class FailingEngine(RolloutEngine):
    """Breaks after a few steps."""

    steps = 3

    def step(self) -> StepReport:
        self.steps -= 1
        if self.steps < 0:
            raise RuntimeError("a part of the machine is gone")
        return super().step()


class PoisonedEngine(RolloutEngine):
    """Breaks whenever it writes behind a prompt that begins with its poison."""

    poison = 66

    def step(self) -> StepReport:
        report = super().step()
        for name, tokens, _ in self.unfinished():
            if name in self.running() and tokens[0] == self.poison:
                raise RuntimeError("a part of the machine is gone")
        return report


class SlowlyCountedEngine(RolloutEngine):
    """Takes its time to count its KV."""

    def kv_usage(self) -> KVUsage:
        time.sleep(0.05)
        return super().kv_usage()


@cache
def the_tokenizer() -> Tokenizer:
    return tiny_tokenizer()


def make_engine(
    kind: type[RolloutEngine] = RolloutEngine,
    limits: Limits = LIMITS,
    speculation: Speculation | None = None,
    dtype: torch.dtype = torch.float64,
) -> RolloutEngine:
    sizes = EngineLimits(max_running=limits.max_running, max_step_tokens=64, max_len=limits.max_len)
    return kind(tiny_model(dtype=dtype), the_tokenizer().decode, sizes, speculation=speculation)


def make_service(
    engine: RolloutEngine, limits: Limits = LIMITS, *, then: Sequence[RolloutEngine] = ()
) -> Service:
    """Put a service in front of an engine, and of others `then`, should it fail."""
    engines = iter((engine, *then))
    return Service(lambda: next(engines), the_tokenizer().decode, limits, ServeMetrics())


def make_served(
    engine: RolloutEngine,
    limits: Limits = LIMITS,
    api_key: str | None = None,
    *,
    then: Sequence[RolloutEngine] = (),
) -> Served:
    engines = iter((engine, *then))
    return front(lambda: next(engines), the_tokenizer(), limits, name=NAME, api_key=api_key)


@contextmanager
def live(served: Served, **options: object) -> Iterator[httpx.Client]:
    """Serve on a port of this machine, with a client that knows it."""
    with (
        running(served) as port,
        httpx.Client(
            base_url=f"http://127.0.0.1:{port}", timeout=_TIMEOUT_S, trust_env=False, **options
        ) as client,
    ):
        yield client


def is_free(engine: RolloutEngine) -> bool:
    """Tell whether nothing is left behind."""
    usage = engine.kv_usage()
    return engine.num_unfinished == 0 and usage.free == usage.total
