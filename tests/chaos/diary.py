"""A log of what the driver and each worker do, which the killing process reads.

One JSON object a line, appended in one write, by the driver and by workers alike:

    {"at": 812.25, "who": 1, "pid": 4711}                     worker 1 has a process
    {"at": 813.50, "who": 1, "state": "generating"}           its new state
    {"at": 813.50, "who": 1, "task": "generate"}              it was given a task
    {"at": 813.40, "who": -1, "state": "rollout", "step": 2}  the driver entered a phase
    {"at": 819.10, "who": -1, "ended": "rollout", "step": 2}  the driver left it

`at` is CLOCK_MONOTONIC, which all processes of a machine share.
"""

import json
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DRIVER = -1
STARTING, ANEW, IDLE, DEAD, SETUP = "starting", "starting anew", "idle", "dead", "setting up"
BETWEEN = "between phases"

_TASKS = {
    "generate": "generating",
    "spot": "spot training",
    "learn": "learning",
    "join": "meeting the team",
    "publish": "publishing weights",
    "adopt": "adopting a drafter",
    "learner_state": "checkpointing",
    "save_policy": "checkpointing",
}
"""Activity by the name of a task; every other task sets something up."""


def note(path: Path, who: int, **entry: object) -> None:
    """Append an entry."""
    line = json.dumps({"at": time.monotonic(), "who": who, **entry}) + "\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


@dataclass
class Actor:
    """A worker, or the driver, as the diary shows it."""

    activity: str = STARTING
    pid: int = 0
    """0 while it has no process that is known."""


@dataclass
class Reader:
    """Follows a diary that is being written."""

    path: Path
    actors: dict[int, Actor] = field(default_factory=dict)
    entries: list[dict[str, Any]] = field(default_factory=list)
    entered: list[tuple[float, int, str]] = field(default_factory=list)
    """When who entered which activity, however short it was."""
    _offset: int = 0

    def read(self) -> int:
        """Take in what was written since; return the number of new entries."""
        new = list(self._new())
        for entry in new:
            self._take(entry)
        self.entries += new
        return len(new)

    @property
    def workers(self) -> dict[int, Actor]:
        """The workers by number."""
        return {who: actor for who, actor in self.actors.items() if who != DRIVER}

    def _new(self) -> Iterator[dict[str, Any]]:
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        yield from map(json.loads, whole.splitlines())

    def _take(self, entry: dict[str, Any]) -> None:
        who = entry["who"]
        before = self.actors[who].activity if who in self.actors else ""
        actor = self.actors.setdefault(who, Actor())
        if "pid" in entry:
            actor.pid = entry["pid"]
        elif "task" in entry and actor.activity not in (STARTING, ANEW):
            actor.activity = _TASKS.get(entry["task"], SETUP)
        elif entry.get("state") == STARTING and who != DRIVER:
            actor.activity = ANEW  # every worker begins in STARTING: only successors move there
        elif "state" in entry and (who == DRIVER or entry["state"] in (IDLE, DEAD)):
            actor.activity = entry["state"]  # at work: its task follows at once, and says more
            if actor.activity == DEAD:
                actor.pid = 0
        if actor.activity != before:
            self.entered.append((entry["at"], who, actor.activity))


def lengths(entered: Iterable[tuple[float, int, str]]) -> dict[str, list[float]]:
    """Return how long each activity lasted, each time."""
    last, found = dict[int, tuple[float, str]](), dict[str, list[float]]()
    for at, who, activity in entered:
        if who in last:
            since, before = last[who]
            found.setdefault(named(who, before), []).append(at - since)
        last[who] = (at, activity)
    return found


def named(who: int, activity: str) -> str:
    """Return the name of an activity that distinguishes the driver from a worker."""
    return f"driver: {activity}" if who == DRIVER else activity
