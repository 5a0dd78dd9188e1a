"""The tasks of workers. A task is a method of `Worker` that runs alone; its state is the worker's.

GENERATE         GENERATING   a shard of a rollout
TRAIN_DRAFTER    SPOT         the drafter, until it is stopped
ACCUMULATE       AHEAD        a micro-batch of a finished group
all others       LEARNING     what all workers do between two rollouts
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from longtail.cluster.workers.states import State
from longtail.cluster.workers.worker import Worker

R = TypeVar("R", covariant=True)


@dataclass(frozen=True, slots=True)
class Task(Generic[R]):
    """A task with a result R.

    Example: Task(Worker.generate, State.GENERATING, has_beats=True)
    """

    method: Callable[..., R]
    state: State = State.LEARNING
    has_beats: bool = False
    """Whether the worker's `Progress.beats` rise during the task."""


GENERATE = Task(Worker.generate, State.GENERATING, has_beats=True)
TRAIN_DRAFTER = Task(Worker.train_drafter, State.SPOT, has_beats=True)
ACCUMULATE = Task(Worker.accumulate, State.AHEAD, has_beats=True)
LEARN = Task(Worker.learn, has_beats=True)
ADOPT = Task(Worker.adopt)
DRAFTER = Task(Worker.drafter)
JOIN = Task(Worker.join)
LEARNER_STATE = Task(Worker.learner_state)
NUM_PARAMETERS = Task(Worker.num_parameters)
PARK = Task(Worker.park)
POLICY_STATE = Task(Worker.policy_state)
POLICY_DIGEST = Task(Worker.policy_digest)
PUBLISH = Task(Worker.publish)
READY = Task(Worker.ready)
RESTORE = Task(Worker.restore)
RESTORE_SAVED = Task(Worker.restore_saved)
SAVE_DRAFTER = Task(Worker.save_drafter)
SAVE_POLICY = Task(Worker.save_policy)
SOLVE_DRAFTER = Task(Worker.solve_drafter)
UNPARK = Task(Worker.unpark)
