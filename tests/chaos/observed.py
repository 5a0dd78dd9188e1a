"""`longtail` as its command line starts it, which keeps a diary of the driver and its workers.

    main(["DIARY", "train", "--run.dir=...", "--cluster.workers=2"])

Only what is seen from outside is noted: the changes of the workers' states, the tasks that they are
given, and the phases of the loop. On signal SIGUSR1 the driver and each worker write the stacks of
their threads beside the diary, which shows why a run hangs.
"""

import faulthandler
import functools
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaos import diary
from longtail.cli import main as cli
from longtail.cluster.group import WorkerGroup
from longtail.cluster.ray.pool import RayWorkerPool
from longtail.cluster.states import State, WorkerStates
from longtail.loop import Trainer
from longtail.rl.grading.pool import GraderPool

_PHASES: tuple[tuple[type, str, str], ...] = (
    (WorkerGroup, "rollout", "rollout"),
    (GraderPool, "grade", "grading"),
    (WorkerGroup, "learn", "learning"),
    (WorkerGroup, "publish", "publishing"),
    (WorkerGroup, "offer_drafter", "offering a drafter"),
    (Trainer, "_checkpoint", "checkpointing"),
    (Trainer, "_finish", "finishing"),
)


@dataclass(frozen=True, slots=True)
class Born:
    """Makes a worker after noting the process in which it is made."""

    path: Path
    make: Callable[[int], Any]

    def __call__(self, number: int) -> Any:
        show_stacks(self.path)
        diary.note(self.path, number, pid=os.getpid())
        return self.make(number)


def show_stacks(path: Path) -> None:
    """On SIGUSR1 write the stacks of all threads to a file beside the diary."""
    file = path.with_name(f"stacks-{os.getpid()}").open("w")
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
    _open_files.append(file)


_open_files: list[Any] = []
"""faulthandler keeps the descriptor alone; the files stay open as long as the process."""


def observe(path: Path) -> None:
    """Make the parts of this process log what they do."""
    step = 0
    phases = [diary.STARTING]

    def in_phase(name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(inner)
        def outer(*args: Any, **kwargs: Any) -> Any:
            phases.append(name)
            diary.note(path, diary.DRIVER, state=name, step=step)
            try:
                result = inner(*args, **kwargs)
            finally:
                phases.pop()
                diary.note(path, diary.DRIVER, state=phases[-1], step=step)
            diary.note(path, diary.DRIVER, ended=name, step=step)
            return result

        return outer

    for owner, name, phase in _PHASES:
        setattr(owner, name, in_phase(phase, getattr(owner, name)))

    begin, advance = Trainer.begin, Trainer.advance

    def begins(self: Trainer) -> None:
        begin(self)
        phases[:] = [diary.BETWEEN]
        diary.note(path, diary.DRIVER, state=diary.BETWEEN, step=step)

    def advances(self: Trainer) -> dict[str, float]:
        nonlocal step
        step = self._state.step + 1
        return advance(self)

    init_pool, start, move = RayWorkerPool.__init__, RayWorkerPool.start, WorkerStates.move

    def makes(self: RayWorkerPool, make: Callable[[int], Any], *args: Any, **kwargs: Any) -> None:
        init_pool(self, Born(path, make), *args, **kwargs)

    def starts(self: RayWorkerPool, worker: int, task: Any, *args: Any, **kwargs: Any) -> None:
        diary.note(path, worker, task=task.__name__)
        start(self, worker, task, *args, **kwargs)

    def moves(self: WorkerStates, worker: int, state: State, reason: str = "") -> None:
        move(self, worker, state, reason)
        diary.note(path, worker, state=state.value, reason=reason)

    Trainer.begin, Trainer.advance = begins, advances
    RayWorkerPool.__init__, RayWorkerPool.start, WorkerStates.move = makes, starts, moves


def main(words: list[str]) -> int:
    """Run `longtail` with all words but the first, which is the diary."""
    path = Path(words[0])
    show_stacks(path)
    diary.note(path, diary.DRIVER, pid=os.getpid())
    observe(path)
    return cli.main(words[1:])
