"""Workers as Ray actors (extra `cluster`).

Without an address this starts a Ray of its own on this machine (`own_ray`), and stops it at
the end. Else its workers are on the hosts of a cluster: worker 0 on the driver's, where it writes
the run's directory, the others spread, one processor each, with their GPUs. Workers of a host that
dies start on hosts that have room. What several workers are sent is stored in Ray once, and comes
to each host once. Ray pickles what passes between processes: use a cluster that you trust, as Ray
itself requires (SECURITY.md).
"""

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Event
from typing import Any, ClassVar, NamedTuple, TypeVar, cast, final

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from longtail.cluster.records import Progress, TaskResult
from longtail.cluster.workers.processes import Place, Processes
from longtail.cluster.workers.ray import host_checks
from longtail.cluster.workers.ray.actor import Actor, send_tensors_as_arrays
from longtail.cluster.workers.ray.own_ray import OwnRay, quietly
from longtail.cluster.workers.ray.watch_ray import check_answers, end_with_ray
from longtail.cluster.workers.worker import Stopped, Worker
from longtail.errors import ClusterError, LongtailError, LostWorkerError

R = TypeVar("R")

_ANSWER_S = 20.0
"""Seconds for the answer to a message: an engine step is far shorter."""
_MESSAGES = "messages"
_PROGRESS_S = 2.0
"""Seconds for the answers to `progress`; a late answer is returned by the next call."""


class _Call(NamedTuple):
    """A task that runs."""

    worker: int
    task: str


@final
class RayProcesses(Processes):
    """Starts `size` workers, each made by `make(place)` in a process of its own.

    They are on this machine, or on the hosts of the cluster at `address`, which must have `kit`.
    `log` receives the lines that workers of this machine print, if its Ray is the run's own.
    """

    _own_ray: ClassVar[OwnRay | None] = None
    _has_connected: ClassVar[bool] = False
    """Whether an object of this process has connected it to an existing cluster."""
    _may_end: ClassVar[Event] = Event()
    """Whether Ray may end now without ending this process."""
    _users: ClassVar[set[int]] = set()
    """Objects of this process that use its Ray; the last one stops it."""

    def __init__(
        self,
        make: Callable[[Place], Worker],
        size: int,
        *,
        address: str = "",
        kit: host_checks.Kit | None = None,
        gpus: float = 0.0,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._log = log
        self._make, self.size, self._gpus = make, size, gpus
        self._users.add(id(self))
        self._start_ray(address)
        send_tensors_as_arrays()
        self._kit = kit
        self._is_cluster = bool(address)
        self._hosts: dict[int, str] = {}
        """Address of each worker's host in a cluster; none while it waits for room."""
        self._files: dict[Path, dict[str, Any]] = {}
        """Files of directories in Ray, while workers are made that lack them."""
        self._stored: dict[int, tuple[object, Any]] = {}
        """Objects that were sent last, with their references: the next worker may be sent them."""
        self._num_teams = 0
        self._running: dict[Any, _Call] = {}
        self._absent: dict[int, Any] = {}
        """First calls of the workers on a cluster whose processes wait for room."""
        self._progress: dict[int, Any] = {}
        """Calls of `Worker.progress` that are not answered yet."""
        self._actors = [self._actor(worker) for worker in range(size)]

    def absent(self) -> frozenset[int]:
        """Return the workers whose processes wait for room on a host."""
        return frozenset(self._absent)

    def start(self, worker: int, task: Callable[..., object], *args: object) -> None:
        """Send the task to the worker."""
        assert all(worker != each.worker for each in self._running.values()), "it is at work"
        reference = self._sent(worker, self._actors[worker].call, task, *args)
        self._running[reference] = _Call(worker, task.__name__)

    def wait(self, timeout_s: float) -> list[TaskResult]:
        """Return the tasks that have ended; wait only if there is none."""
        self._log_output()
        calls = [*self._running, *self._absent.values()]
        if not calls:
            time.sleep(timeout_s)
            return []
        done, _ = ray.wait(calls, num_returns=1, timeout=timeout_s)
        return [ended for ref in done if (ended := self._ended(ref)) is not None]

    def answers(
        self, message: Callable[..., R], args: Mapping[int, tuple[object, ...]]
    ) -> dict[int, R | ClusterError]:
        """Call the message on all workers, and wait some seconds for all answers together."""
        found: dict[int, R | ClusterError] = {}
        calls: dict[int, Any] = {}
        for worker, own in args.items():
            try:
                call = self._in_message_thread(self._actors[worker].call)
                calls[worker] = self._sent(worker, call, message, *own)
            except ClusterError as error:
                found[worker] = error
        deadline = time.monotonic() + _ANSWER_S
        for worker, reference in calls.items():
            try:
                left_s = max(deadline - time.monotonic(), 0.0)
                found[worker] = cast(R, self._answer(worker, reference, left_s))
            except ClusterError as error:
                found[worker] = error
        return found

    def progress(self, workers: Sequence[int]) -> dict[int, Progress]:
        """Ask all workers together, and wait a short time for their answers."""
        for worker in workers:
            if worker not in self._progress:
                call = self._in_message_thread(self._actors[worker].call)
                self._progress[worker] = call.remote(Worker.progress)
        asked = {self._progress[worker]: worker for worker in workers}
        done = (
            ray.wait(list(asked), num_returns=len(asked), timeout=_PROGRESS_S)[0] if asked else ()
        )
        found: dict[int, Progress] = {}
        for reference in done:
            del self._progress[asked[reference]]
            try:
                found[asked[reference]] = ray.get(reference)
            except RayError:  # the worker is gone, so its task ends, too
                continue
        return found

    def rendezvous_address(self) -> str:
        """Return an address for a team: a file here, or a port at the first worker's machine."""
        if self._own_ray is not None:
            self._num_teams += 1
            return f"file://{self._own_ray.folder}/team-{id(self)}-{self._num_teams}"
        host, port = self._answer(0, self._in_message_thread(self._actors[0].free_address).remote())
        return f"tcp://{host}:{port}"

    def replace(self, worker: int) -> None:
        """Kill the worker's process and start another."""
        self._hosts.pop(worker, None)
        ray.kill(self._actors[worker])
        self._progress.pop(worker, None)
        self._running = {ref: each for ref, each in self._running.items() if each.worker != worker}
        self._absent.pop(worker, None)
        self._actors[worker] = self._actor(worker)

    def close(self) -> None:
        """End all workers; the last such object also disconnects from Ray, or stops its own."""
        for actor in self._actors:
            ray.kill(actor)
        self._log_output()
        self._running.clear()
        self._users.discard(id(self))
        if self._users:
            return
        self._may_end.set()
        if self._own_ray is not None:
            self._own_ray.close()
            RayProcesses._own_ray = None
        elif self._has_connected:
            ray.shutdown()
        RayProcesses._has_connected = False

    def _log_output(self) -> None:
        """Log the lines that workers have printed."""
        for line in [] if self._own_ray is None else self._own_ray.read_new_lines():
            self._log(line)

    def _start_ray(self, address: str) -> None:
        if ray.is_initialized():
            return
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # By default Ray gives workers a low priority, and a team waits for its slowest member.
        os.environ.setdefault("RAY_worker_niceness", "0")
        try:
            if address:
                check_answers(address)
                with quietly():
                    ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
                RayProcesses._has_connected = True
            else:
                RayProcesses._own_ray = OwnRay(self.size)
            own, head = self._own_ray, str(ray.get_runtime_context().gcs_address)
            RayProcesses._may_end = (
                end_with_ray(lambda: None, head) if own is None else end_with_ray(own.hush)
            )
        except Exception as error:  # Ray raises any
            what = f"cluster.address = {address!r}" if address else "cluster.workers"
            raise ClusterError(
                f"{what}: could not connect to or start Ray ({_first_line(error)}); check that it "
                "runs there (if it requires a token, set RAY_AUTH_MODE=token here, too), or set "
                "cluster.workers = 1 to do without"
            ) from error

    def _actor(self, worker: int) -> Any:
        remote: Any = ray.remote  # its stubs do not know concurrency groups
        remote = remote(concurrency_groups={_MESSAGES: 2}, max_restarts=0)
        if not self._is_cluster:  # several runs may share this machine
            actor = remote(Actor).options(num_cpus=0, num_gpus=self._gpus).remote()
            self._make_worker(worker, actor, {})
            return actor
        here = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        actor = (
            remote(Actor)
            .options(
                num_cpus=1,
                num_gpus=self._gpus,
                resources={} if worker else {f"node:{here}": 0.001},
                scheduling_strategy="SPREAD",
            )
            .remote()
        )
        self._absent[worker] = actor.free_address.remote()
        return actor

    def _make_worker(
        self, worker: int, actor: Any, files: Mapping[Path, Mapping[str, Any]]
    ) -> None:
        """Start the first task of a worker. `files` of directories are in Ray."""
        place = Place(worker=worker, sharing=self._sharing(worker))
        reference = actor.make.remote(self._make, place, self._kit, files)
        self._running[reference] = _Call(worker, "make")

    def _sharing(self, worker: int) -> int:
        """Return the number of workers on a worker's host: its even share, or those it has."""
        if not self._is_cluster:
            return self.size
        nodes = [each for each in ray.nodes() if each["Alive"]]  # type: ignore[no-untyped-call]
        num_hosts = sum("CPU" in each["Resources"] for each in nodes)
        here = list(self._hosts.values()).count(self._hosts[worker])
        return max(-(-self.size // max(num_hosts, 1)), here)

    def _send_files(self, worker: int, folders: Sequence[Path]) -> None:
        """Make a worker whose host lacks directories; each is stored in Ray once."""
        assert self._kit is not None, "only other hosts lack files"
        for folder in folders:
            try:
                if folder not in self._files:
                    read = host_checks.read(folder, self._kit.folders[folder])
                    self._files[folder] = {name: ray.put(read[name]) for name in read}
            except RayError as error:
                raise ClusterError(
                    f"{folder} does not fit into Ray's object store ({_first_line(error)}); copy "
                    "it to every host, or start Ray with a larger --object-store-memory"
                ) from error
        files = {folder: self._files[folder] for folder in folders}
        self._make_worker(worker, self._actors[worker], files)

    def _ended(self, reference: Any) -> TaskResult | None:
        """Return the result of a task; None if a worker begins to start, or waits for files."""
        if reference not in self._running:
            return self._arrived(next(w for w, ref in self._absent.items() if ref == reference))
        worker, task = self._running.pop(reference)
        if all(each.task != "make" for each in self._running.values()):
            self._files = {}
        try:
            result = ray.get(reference, timeout=_ANSWER_S)
            if task == "make" and result:
                self._send_files(worker, result)
                return None
            return TaskResult(worker=worker, result=result)
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, LongtailError | Stopped):
                return TaskResult(worker=worker, error=cause)
            if isinstance(cause, RayError):  # no room for the result
                return self._lost(worker, cause)
            return TaskResult(worker=worker, error=ClusterError(f"worker {worker}: {error}"))
        except RayError as error:  # the process is gone, or its result is
            return self._lost(worker, error)

    def _arrived(self, worker: int) -> TaskResult | None:
        """Make the worker, whose process has found room."""
        try:
            self._hosts[worker] = ray.get(self._absent.pop(worker), timeout=_ANSWER_S)[0]
        except RayError as error:
            return self._lost(worker, error)
        self._make_worker(worker, self._actors[worker], {})
        return None

    def _lost(self, worker: int, error: Exception) -> TaskResult:
        where = f" on {self._hosts[worker]}" if worker in self._hosts else ""
        reason = ClusterError(f"worker {worker}{where} is gone: {_first_line(error)}")
        return TaskResult(worker=worker, error=reason, is_lost=True)

    @staticmethod
    def _in_message_thread(method: Any) -> Any:
        """Return a method that is called in the thread of messages, beside any task."""
        return method.options(concurrency_group=_MESSAGES)

    def _sent(self, worker: int, method: Any, *args: object) -> Any:
        """Call a method of an actor. Raises ClusterError if Ray cannot store its arguments."""
        before, self._stored = self._stored, {}
        sent = list(args)
        try:
            for index, each in enumerate(args):
                if not _is_small(each):
                    stored = before.get(id(each)) or (each, ray.put(each))
                    self._stored[id(each)], sent[index] = stored, stored[1]
            return method.remote(*sent)
        except RayError as error:
            raise ClusterError(
                f"what is for worker {worker} cannot be sent: {_first_line(error)}"
            ) from error

    def _answer(self, worker: int, reference: Any, timeout_s: float = _ANSWER_S) -> Any:
        try:
            return ray.get(reference, timeout=timeout_s)
        except GetTimeoutError as error:
            raise ClusterError(f"worker {worker} has not answered for {_ANSWER_S:.0f} s") from error
        except RayActorError as error:
            raise LostWorkerError(f"worker {worker} is gone: {_first_line(error)}") from error
        except RayTaskError as error:
            what = f"{type(error.cause).__name__}: {error.cause}"
            raise ClusterError(f"worker {worker} cannot answer: {what}") from error
        except RayError as error:
            raise ClusterError(f"worker {worker} cannot answer: {_first_line(error)}") from error


def _is_small(sent: object) -> bool:
    """Return whether what is sent need not be stored in Ray once for several workers."""
    return sent is None or callable(sent) or isinstance(sent, int | float | str | Path)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0].rstrip(".")
