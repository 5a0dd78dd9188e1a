"""The parts of a worker: generator, learner, drafter and what trains it."""

from dataclasses import dataclass
from typing import Literal

from longtail.drafter.formats.checkpoint import LoadedDrafter
from longtail.drafter.training.buffer import DrafterBuffer
from longtail.drafter.training.spot import SpotTrainer
from longtail.drafter.weights import DrafterWeights
from longtail.generator import Generator
from longtail.model.hf.tokenizer import Tokenizer
from longtail.model.policy import Policy
from longtail.rl.learner import Learner
from longtail.speculation.drafter import Statistics, Sums


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """The drafter that a worker serves, and how it learns: from sums, or by gradient."""

    served: DrafterWeights
    """Initial weights of the drafter."""
    buffer: DrafterBuffer
    """Sequences of `trainer`."""
    statistics: Statistics | None = None
    """Adds up what the engine writes."""
    sums: Sums | None = None
    """Sums that the drafter begins with."""
    trainer: SpotTrainer | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerComponents:
    """The components of a worker, none of which knows another."""

    generator: Generator
    learner: Learner
    policy: Policy
    """The learner's model, for saving; in main memory if it is sharded."""
    backend: Literal["gloo", "nccl"]
    """Library that sums gradients: `nccl` where each worker has a GPU of its own."""
    tokenizer: Tokenizer
    drafting: Drafting | None
    """None if no drafter learns."""
    drafter: LoadedDrafter | None
    """The drafter with weights as the run began with it, if there is one."""
    rollout_threads: int
