"""Workers as Ray actors (extra `cluster`).

Without an address a Ray of its own is started on this machine (`own_ray`) and stopped at the end.
With one, an existing cluster is used; the model's directory and the run's must be readable there
under the same paths. What passes between processes is pickled by Ray: use a cluster that you trust,
as Ray itself asks (SECURITY.md).
"""

import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Concatenate, ParamSpec, TypeVar, final

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from longtail.cluster.pool import TaskResult, WorkerPool
from longtail.cluster.ray.instance import OwnRay, check_is_ray, discreetly
from longtail.cluster.records import Progress
from longtail.cluster.worker import Stopped, Worker
from longtail.errors import ClusterError, LongtailError, LostWorkerError

P = ParamSpec("P")
R = TypeVar("R")

_PATIENCE_S = 20.0
"""For the answer to a message: an engine step and a garbage collection are far shorter."""
_REACH_S = 4.0
"""For a cluster to say that it is one."""
_MESSAGES = "messages"
_MOMENT_S = 2.0
"""For word of how far everybody is. Who is late is heard the next time."""


class _Actor:
    """A worker in a process of its own; tasks in one thread, messages in another."""

    def __init__(self) -> None:
        self._worker: Worker | None = None

    def make(self, make: Callable[[int], Worker], number: int) -> None:
        """Make the worker. A task like others: an error there is no lost process."""
        self._worker = make(number)

    def run(self, task: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Do a task."""
        return task(self._worker, *args, **kwargs)

    def tell(self, message: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Deliver a message."""
        return message(self._worker, *args, **kwargs)

    def whereabouts(self) -> tuple[str, int]:
        """Return its address, and a port that is free there."""
        address = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        with socket.socket() as probe:
            probe.bind(("", 0))
            return address, probe.getsockname()[1]


@final
class RayWorkerPool(WorkerPool):
    """Starts `size` workers, each made by `make(number)` in a process of its own.

    `log` is given what they print, where they are on this machine.
    """

    _own_ray: ClassVar[OwnRay | None] = None
    _has_connected: ClassVar[bool] = False
    """To a Ray by address, which was not done before by others in this process."""
    _sharers: ClassVar[set[int]] = set()
    """Crews of this process that use its Ray; the last one stops it."""

    def __init__(
        self,
        make: Callable[[int], Worker],
        size: int,
        *,
        address: str = "",
        gpus: float = 0.0,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._log = log
        self._make, self._size, self._gpus = make, size, gpus
        self._is_local = not address
        self._sharers.add(id(self))
        self._begin_ray(address)
        self._running: dict[Any, int] = {}
        self._looks: dict[int, Any] = {}
        """Questions how far a worker is that are not answered yet."""
        self._actors = [self._actor(worker) for worker in range(size)]

    @property
    def size(self) -> int:
        """Number of workers."""
        return self._size

    def start(
        self,
        worker: int,
        task: Callable[Concatenate[Worker, P], object],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        """Send the task off."""
        assert worker not in self._running.values(), f"worker {worker} is at work"
        self._running[self._sent(worker, self._actors[worker].run, task, args, kwargs)] = worker

    def wait(self, timeout_s: float) -> list[TaskResult]:
        """Return what has ended; at once if something has."""
        self._pass_on()
        if not self._running:
            time.sleep(timeout_s)
            return []
        done, _ = ray.wait(list(self._running), num_returns=1, timeout=timeout_s)
        return [self._ended(reference) for reference in done]

    def ask(
        self,
        worker: int,
        message: Callable[Concatenate[Worker, P], R],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """Ask, with patience for some seconds."""
        tell = self._beside(self._actors[worker].tell)
        return self._answer(worker, self._sent(worker, tell, message, args, kwargs))

    def progress(self, workers: Sequence[int]) -> dict[int, Progress]:
        """Ask all at once, and wait a moment."""
        for worker in workers:
            if worker not in self._looks:
                tell = self._beside(self._actors[worker].tell)
                self._looks[worker] = tell.remote(Worker.progress, (), {})
        asked = {self._looks[worker]: worker for worker in workers}
        done = ray.wait(list(asked), num_returns=len(asked), timeout=_MOMENT_S)[0] if asked else ()
        found: dict[int, Progress] = {}
        for reference in done:
            del self._looks[asked[reference]]
            try:
                found[asked[reference]] = ray.get(reference)
            except RayError:  # it is gone: then its task ends
                continue
        return found

    def meeting_point(self) -> str:
        """Return where all can meet; elsewhere that is where the first is. Raises ClusterError."""
        if self._own_ray is not None:
            return self._own_ray.meeting_point()
        host, port = self._answer(0, self._beside(self._actors[0].whereabouts).remote())
        return f"tcp://{host}:{port}"

    def replace(self, worker: int) -> None:
        """Kill what is left of it and begin another."""
        ray.kill(self._actors[worker])
        self._looks.pop(worker, None)
        self._running = {ref: each for ref, each in self._running.items() if each != worker}
        self._actors[worker] = self._actor(worker)

    def close(self) -> None:
        """End all workers, and leave Ray, which ends if it is ours."""
        for actor in self._actors:
            ray.kill(actor)
        self._pass_on()
        self._running.clear()
        self._sharers.discard(id(self))
        if self._sharers:
            return
        if self._own_ray is not None:
            self._own_ray.close()
            RayWorkerPool._own_ray = None
        elif self._has_connected:
            ray.shutdown()
        RayWorkerPool._has_connected = False

    def _pass_on(self) -> None:
        """Say what the workers have printed."""
        for line in [] if self._own_ray is None else self._own_ray.lines():
            self._log(line)

    def _begin_ray(self, address: str) -> None:
        if ray.is_initialized():
            return
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Ray's own default lets anything else on the machine go first: workers wait for it, and
        # whoever learns together waits for the slowest.
        os.environ.setdefault("RAY_worker_niceness", "0")
        try:
            if address:
                if ":" in address:
                    check_is_ray(address, _REACH_S)
                with discreetly():
                    ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
                RayWorkerPool._has_connected = True
            else:
                RayWorkerPool._own_ray = OwnRay(self._size)
        except (ConnectionError, RayError, OSError, RuntimeError, ValueError) as error:
            what = f"cluster.address = {address!r}" if address else "cluster.workers"
            raise ClusterError(
                f"{what}: Ray cannot be reached or begun ({_first_line(error)}); see that it runs "
                "there (if it asks for a token, RAY_AUTH_MODE=token is wanted here, too), or set "
                "cluster.workers = 1 to do without"
            ) from error

    def _actor(self, worker: int) -> Any:
        remote: Any = ray.remote  # its stubs do not know concurrency groups
        remote = remote(concurrency_groups={_MESSAGES: 2}, max_restarts=0)
        own = remote(_Actor).options(
            num_cpus=0 if self._is_local else 1,  # several crews may share this machine
            num_gpus=self._gpus,
        )
        actor = own.remote()
        self._running[actor.make.remote(self._make, worker)] = worker
        return actor

    def _ended(self, reference: Any) -> TaskResult:
        worker = self._running.pop(reference)
        try:
            return TaskResult(worker=worker, result=ray.get(reference, timeout=_PATIENCE_S))
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, LongtailError | Stopped):
                return TaskResult(worker=worker, error=cause)
            if isinstance(cause, RayError):  # no room for the result
                return _lost(worker, cause)
            return TaskResult(worker=worker, error=ClusterError(f"worker {worker}: {error}"))
        except RayError as error:  # the process is gone, or the result: as good as gone
            return _lost(worker, error)

    @staticmethod
    def _beside(method: Any) -> Any:
        """Have a method called in the thread of messages, whatever the other one does."""
        return method.options(concurrency_group=_MESSAGES)

    def _sent(self, worker: int, method: Any, *args: object) -> Any:
        """Send something off. Raises ClusterError if it finds no room on its way."""
        try:
            return method.remote(*args)
        except RayError as error:
            raise ClusterError(
                f"what is for worker {worker} cannot be sent: {_first_line(error)}"
            ) from error

    def _answer(self, worker: int, reference: Any) -> Any:
        try:
            return ray.get(reference, timeout=_PATIENCE_S)
        except GetTimeoutError as error:
            raise ClusterError(
                f"worker {worker} has not answered for {_PATIENCE_S:.0f} s"
            ) from error
        except RayActorError as error:
            raise LostWorkerError(f"worker {worker} is gone: {_first_line(error)}") from error
        except RayTaskError as error:
            what = f"{type(error.cause).__name__}: {error.cause}"
            raise ClusterError(f"worker {worker} cannot answer: {what}") from error
        except RayError as error:
            raise ClusterError(f"worker {worker} cannot answer: {_first_line(error)}") from error


def _lost(worker: int, error: Exception) -> TaskResult:
    reason = ClusterError(f"worker {worker} is gone: {_first_line(error)}")
    return TaskResult(worker=worker, error=reason, is_lost=True)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0].rstrip(".")
