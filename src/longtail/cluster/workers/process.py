"""Records of the supervisor about the process of a worker."""

import enum
import math
from dataclasses import dataclass

READY_S = 600.0
"""Seconds for a worker to start, or for a task without beats: a large model is read from disk."""
NO_BEATS = -1


class Startup(enum.Enum):
    """The task of a new process before it is idle for the first time."""

    READY = enum.auto()
    RESTORE = enum.auto()
    PUBLISH = enum.auto()


GETS_POLICY = (Startup.RESTORE, Startup.PUBLISH)


@dataclass(slots=True)
class Process:
    """Signs of life, stop requests and startup of a worker's process."""

    seen_s: float
    """Time of its last sign of life, or of the start of its task."""
    beats: int = NO_BEATS
    max_silence_s: float = READY_S
    """Seconds that its task may take without a sign of life."""
    stop_s: float = math.inf
    """Time at which it was asked to stop its task."""
    must_clear_stop: bool = False
    """Whether it would still obey that request in its next task."""
    startup: Startup | None = None
    withholds_since_s: float | None = None
    """Time of the first request for the policy that it has not answered."""
