"""Running the service: the socket, the signals, the end. What `longtail serve` does."""

import asyncio
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import uvicorn
from starlette.types import ASGIApp

from longtail.build.engine import locate_model, open_engine, open_model
from longtail.engine.engine import RolloutEngine
from longtail.engine.limits import EngineLimits
from longtail.errors import ConfigError, UnavailableError
from longtail.model.hf.tokenizer import Tokenizer, load_tokenizer
from longtail.serve.app import make_app
from longtail.serve.metrics import ServeMetrics
from longtail.serve.options import Limits, Setting
from longtail.serve.service import Service
from longtail.system.device import set_threads, to_stderr
from longtail.system.interrupt import Interruption

_STEP_TOKENS = 512
_LAST_WORDS_S = 5
"""For answers to reach their clients after the last completion."""
_POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A service and the application in front of it.

    Example: serve(Served(service=service, app=app), sock, drain_s=30.0)
    """

    service: Service
    app: ASGIApp


def run(setting: Setting) -> int:
    """Load the model and serve it until a signal comes."""
    with _bind(setting.host, setting.port) as sock:  # a port that is taken is known before loading
        set_threads(setting.threads)
        served = open_served(setting)
        host = f"[{setting.host}]" if ":" in setting.host else setting.host
        sock.listen()  # whoever reads the next line may connect, and is answered in a moment
        address = f"http://{host}:{sock.getsockname()[1]}/v1"
        # uvicorn takes all signals but SIGHUP once it runs, and hands them on at the end.
        with Interruption() as asked:
            print(f"serving {setting.name} at {address}", flush=True)
            to_stderr("Ctrl-C stops it: what is being written is finished first")
            asyncio.run(_serve(served, sock, setting.drain_s, stops=lambda: asked.came))
    to_stderr("stopped")
    return 0


def open_served(setting: Setting) -> Served:
    """Load the model, make its engine, and put the service in front of it."""
    path = locate_model(setting.model)
    tokenizer = load_tokenizer(path)
    target = open_model(
        setting.model,
        path,
        tokenizer,
        setting.dtype,
        setting.device,
        batch_invariant=setting.batch_invariant,
    )
    shape = target.model.config
    own = setting.limits
    limits = replace(own, max_len=min(own.max_len, shape.max_positions))
    sizes = EngineLimits(
        max_running=limits.max_running,
        max_step_tokens=max(_STEP_TOKENS, limits.max_running),
        max_len=limits.max_len,
        kv_tokens=limits.kv_tokens,
    )

    def make_engine() -> RolloutEngine:
        return open_engine(target, sizes, setting.drafter)

    return front(make_engine, tokenizer, limits, name=setting.name, api_key=setting.api_key)


def front(
    make_engine: Callable[[], RolloutEngine],
    tokenizer: Tokenizer,
    limits: Limits,
    *,
    name: str,
    api_key: str | None = None,
) -> Served:
    """Put a service and its routes in front of an engine; `limits.max_len` is the engine's.

    It is made now, and again should it fail.
    """
    metrics = ServeMetrics()
    service = Service(make_engine, tokenizer.decode, limits, metrics)
    app = make_app(
        service,
        tokenizer,
        metrics,
        limits,
        name=name,
        vocab_size=service.vocab_size,
        api_key=api_key,
    )
    return Served(service=service, app=app)


@contextmanager
def running(served: Served, *, drain_s: float = 5.0) -> Iterator[int]:
    """Serve in a thread on a free port of this machine, which is handed in."""
    with _bind("127.0.0.1", 0) as sock:
        server = _server(served, drain_s)
        serving = _serve(served, sock, drain_s, server)
        thread = threading.Thread(target=asyncio.run, args=(serving,), name="longtail-http")
        thread.start()
        while not server.started:
            if not thread.is_alive():
                raise UnavailableError("the server did not start")
            time.sleep(_POLL_S)
        try:
            yield sock.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


def _server(served: Served, drain_s: float) -> uvicorn.Server:
    return uvicorn.Server(
        uvicorn.Config(
            served.app,
            http="h11",
            loop="asyncio",
            ws="none",
            lifespan="on",
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=math.ceil(drain_s) + _LAST_WORDS_S,
        )
    )


async def _serve(
    served: Served,
    sock: socket.socket,
    drain_s: float,
    server: uvicorn.Server | None = None,
    stops: Callable[[], bool] = lambda: False,
) -> None:
    """Serve until told to stop; then finish what is in progress, for so long, and give it up."""
    server = server or _server(served, drain_s)
    serving = asyncio.create_task(server.serve([sock]))
    while not (server.should_exit or serving.done()):
        if server.started and stops():
            server.should_exit = True
        await asyncio.sleep(_POLL_S)
    await served.service.drain(0.0 if server.force_exit else drain_s)
    await serving


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"--host = {host!r} is no address of this machine ({error})") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"--host = {host!r}, --port = {port}: cannot be bound ({error.strerror}); is another "
            "server there? 0 takes any free port"
        ) from error
    return sock
