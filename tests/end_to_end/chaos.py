"""Chaos: whole runs whose processes are killed at random moments, and resumed until they end.

    python -m end_to_end.chaos --seconds 3600 [--seed 7 [--trial 12]]       make chaos

A trial draws a run and a plan of kills from its seed. Each run must end like one that nothing
disturbed (texts, weights, optimizer, drafter), none may wait longer than its limit, a signal ends
it in time, a failure of Ray ends it with a sentence, and no process of Ray is left. vLLM's engine
is not covered.
"""

import argparse
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil

from end_to_end import processes
from end_to_end.workshop import Workshop, build, save_untaught
from longtail.cluster.workers.worker_pool import WorkerPool
from support.run_processes import command, family

SIGNALS = {name: signal.Signals[name] for name in ("SIGTERM", "SIGINT", "SIGHUP")}
OF_RAY = {
    "worker": r"^ray::Actor",
    "raylet": r"/raylet --",
    "GCS server": r"/gcs_server ",
    "dashboard agent": r"^ray::DashboardAgent",
    "runtime env agent": r"^ray::RuntimeEnvAgent",
    "log monitor": r"log_monitor\.py",
    "dashboard": r"dashboard/dashboard\.py",
}
"""Processes that Ray runs for a run, by their command lines."""
STEPS = 4
TIMEOUT_S = 40
TWO = ("--cluster.workers=2", f"--cluster.worker_timeout_s={TIMEOUT_S}")
RAYS_VOICE = re.compile(r"\(raylet|\(Actor|pid=|\[20\d\d-\d\d-\d\d |Worker ID")
"""What Ray prints, which a run keeps to itself as long as Ray works."""
START_S, STOP_S = 200.0, 30.0
"""Most seconds for the start of a run, and from a signal to its end, times the patience."""
RUN = (
    *("--run.checkpoint_every=1", f"--run.steps={STEPS}", "--data.heldout_size=0"),
    *("--rollout.prompts_per_step=3", "--rollout.max_running=2", "--rollout.max_tokens=100"),
)
"""A worker decodes two at a time, and one of two has twice as many requests: the other idles."""
LEARNERS = {
    "full weights": (),
    "adapters": ("--learner.lora.rank=8",),
    "dynamic sampling": ("--learner.loss=dapo", "--learner.max_refills=1"),
    "shards": ("--learner.sharding=full",),
    "episodes": (
        *("--environment.name=end_to_end.rewards:Echo", "--environment.max_observed=64"),
        "--reward.name=environment",
    ),
}
DRAFTERS = {
    "none": ("none", ()),
    "fresh+history": ("fresh+history", ("solve_drafter", "adopt")),
    "eagle": ("eagle", ("train_drafter", "adopt")),
}
"""Value of the option, and tasks of workers that it brings."""
TASKS = ("start", "generate", "learn", "publish", "save_policy", "restore_saved")
TASKS_OF_TWO = ("accumulate", "join", "restore")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """What is killed, some seconds after the given call of a task of workers, or their message."""

    what: str
    task: str
    call: int
    delay_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A run with kills; drawn from a seed."""

    learner: str
    drafter: str
    workers: int
    plan: tuple[Kill, ...]

    @property
    def words(self) -> tuple[str, ...]:
        """Words of the undisturbed run, with one worker."""
        words = () if self.learner == "shards" else LEARNERS[self.learner]
        return (*RUN, *words, f"--speculation.drafter={DRAFTERS[self.drafter][0]}")


def draw(seed: str) -> Trial:
    """Draw a trial; with two workers shards, and kills of Ray's processes."""
    chance = random.Random(seed)
    workers = chance.choice((1, 2))
    learner = chance.choice([name for name in LEARNERS if name != "shards" or workers == 2])
    drafter = chance.choice(list(DRAFTERS))
    tasks = (*TASKS, *DRAFTERS[drafter][1], *(TASKS_OF_TWO if workers == 2 else ()))
    kinds = ["driver", "driver", *SIGNALS, *(["worker", *OF_RAY] if workers == 2 else ())]
    plan = tuple(
        Kill(
            what=chance.choice(kinds),
            task=(task := chance.choice(tasks)),
            call=chance.choice((1, 2, 4)),
            delay_s=chance.uniform(0, 5.0 * workers if task == "start" else 0.2),
        )
        for _ in range(chance.choice((2, 3, 4)))
    )
    return Trial(learner=learner, drafter=drafter, workers=workers, plan=plan)


# ---- in the process of the run


def arm(trial: Trial, journal: Path) -> None:
    """Carry out what is left of the plan in this process, which becomes a run."""
    left = list(trial.plan[len(lines(journal)) :])
    calls: Counter[str] = Counter()

    def fire() -> None:
        kill = left.pop(0)
        calls.clear()
        pids = [os.getpid()]
        if kill.what in OF_RAY:
            pids = [
                pid for pid in family(os.getpid()) if re.search(OF_RAY[kill.what], command(pid))
            ]
        with journal.open("a") as file:
            file.write(f"{kill.what if pids else 'none'}\n")
        for pid in pids[-1:]:
            os.kill(pid, SIGNALS.get(kill.what, signal.SIGKILL))
        called("start")

    def called(task: str) -> None:
        calls[task] += 1
        if (
            left
            and task == left[0].task
            and calls[task] == (1 if task == "start" else left[0].call)
        ):
            timer = threading.Timer(left[0].delay_s, fire)
            timer.daemon = True
            timer.start()

    def noted(method: Any) -> Any:
        def call(pool: WorkerPool, worker: int, task: Any, *args: Any) -> Any:
            called(task.__name__)
            return method(pool, worker, task, *args)

        return call

    WorkerPool.start, WorkerPool.tell = noted(WorkerPool.start), noted(WorkerPool.tell)  # type: ignore[method-assign]
    called("start")


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


# ---- in the process that watches it


@dataclass(kw_only=True)
class Chaos:
    """Trials in a workshop; every limit is multiplied by `patience`."""

    workshop: Workshop
    patience: float = 1.0
    kills: Counter[str] = field(default_factory=Counter)
    runs: int = 0
    """Number of processes of runs, with those that resume one."""

    def disturb(self, trial: Trial, run: str) -> None:
        """Run and resume until the end. Raises AssertionError if a run does what it must not."""
        sharding = LEARNERS["shards"] if trial.learner == "shards" else ()
        words = (*trial.words, *sharding, *(TWO if trial.workers == 2 else ()))
        journal, code, attempts = self.workshop.path / f"{run}.kills", 1, 0
        while code != 0:
            attempts += 1
            assert attempts <= 2 * len(trial.plan) + 2, "it does not end"
            code = self._attempt(trial, self.workshop.words(run, *words), journal)
        self.kills.update(lines(journal))
        whole = undisturbed(self.workshop, trial.words)
        if trial.learner == "shards":  # their updates round otherwise
            assert self.workshop.texts(run) == self.workshop.texts(whole)
            return
        found, wanted = (self.workshop.outcome(each, STEPS) for each in (run, whole))
        if trial.drafter == "eagle":  # what is trained in idle time depends on a clock
            found["drafter"] = wanted["drafter"]
        differs = [name for name in wanted if found[name] != wanted[name]]
        assert not differs, f"{run} differs from {whole}: {differs}"

    def _attempt(self, trial: Trial, words: list[str], journal: Path) -> int:
        """Run once; return the exit code, which is as it must be after these kills."""
        log, before = journal.with_suffix(".log"), len(lines(journal))
        process = processes.start(words, log, prepare=partial(arm, trial, journal))
        self.runs += 1
        folder = self._watch(process, trial, Path(words[1].partition("=")[2]), journal, before)
        while folder and os.path.exists(folder):  # the reaper ends Ray's processes
            time.sleep(0.05)
        code, killed, said = process.exitcode, lines(journal)[before:], log.read_text()
        has_word = "longtail: " in said
        assert "Traceback" not in said, said
        ray_works = set(killed) <= {"worker", "none", *SIGNALS}
        assert not (ray_works and RAYS_VOICE.search(said)), said
        assert (
            code == 0
            or (code == -signal.SIGKILL and "driver" in killed)
            or (code == 130 and SIGNALS.keys() & killed)
            or (code == -signal.SIGTERM and has_word)  # it is Ray's while its driver connects
            or (code == 1 and has_word)
        ), f"exit code {code} after {killed}:\n{said}"
        return code

    def _watch(
        self, process: BaseProcess, trial: Trial, run: Path, journal: Path, before: int
    ) -> str:
        """Wait for the end of a run, which must go on or end in time; return its Ray's folder."""
        began, folder = time.time(), ""
        while process.is_alive():
            process.join(0.2)
            if process.pid is not None and not folder and trial.workers == 2:
                folder = folder_of(process.pid)
            killed = lines(journal)[before:]
            seen = max(began, *(at(path) for path in (run / "metrics.jsonl", journal)))
            limit_s = TIMEOUT_S + START_S
            if killed and killed[-1] in SIGNALS:
                seen, limit_s = at(journal), STOP_S
            if time.time() - seen > limit_s * self.patience:
                process.kill()
                said = journal.with_suffix(".log").read_text()
                raise AssertionError(f"waits after {killed or 'its start'}:\n{said}")
        return folder


@cache
def undisturbed(workshop: Workshop, words: tuple[str, ...]) -> str:
    """Return the name of a run that nothing disturbs."""
    name = f"whole-{abs(hash(words))}"
    process = processes.start(workshop.words(name, *words), workshop.path / f"{name}.log")
    process.join()
    assert process.exitcode == 0, (workshop.path / f"{name}.log").read_text()
    return name


def at(path: Path) -> float:
    """Return when a file was written last; 0 if there is none."""
    with suppress(FileNotFoundError):
        return path.stat().st_mtime
    return 0.0


def folder_of(pid: int) -> str:
    """Return the folder of a run's own Ray, as its reaper knows it; "" without one."""
    with suppress(psutil.NoSuchProcess):  # it has ended
        for member in family(pid):
            if found := re.search(r"reaper\.py (\S+)", command(member)):
                return found[1]
    return ""


def workshop_with_drafter(path: Path) -> Workshop:
    """Put a model, prompts and an EAGLE drafter into a directory, in which runs begin."""
    workshop = build(path)
    save_untaught(workshop.model, path / "eagle")
    os.chdir(path)
    return workshop


def main(argv: Sequence[str] | None = None) -> int:
    """Make trials for some seconds; the last line has their numbers."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--trial", type=int, help="the only one")
    args = parser.parse_args(argv)
    processes.PATIENCE_S, end, number = START_S, time.monotonic() + args.seconds, args.trial or 0
    chaos = Chaos(workshop=workshop_with_drafter(Path(tempfile.mkdtemp(prefix="chaos-"))))
    fault, trials = "", 0
    while not fault and (time.monotonic() < end if args.trial is None else trials == 0):
        trial = draw(f"{args.seed}-{number}")
        print(f"--seed {args.seed} --trial {number}: {trial}", flush=True)
        try:
            chaos.disturb(trial, f"run-{number}")
        except AssertionError as error:
            fault = f"trial {number} of seed {args.seed} ({chaos.workshop.path}): {error}"
            print(fault)
        number, trials = number + 1, trials + 1
    kills = ", ".join(f"{name} {count}" for name, count in sorted(chaos.kills.items()))
    outcome = f"FAILED: trial {number - 1}" if fault else "all ended like the undisturbed ones"
    print(f"{trials} trials, {chaos.runs} runs, kills: {kills}; {outcome}; seed {args.seed}")
    return bool(fault)


if __name__ == "__main__":
    sys.exit(main())
