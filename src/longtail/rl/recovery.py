"""Recovery of replicated learners from a lost rank: all continue from the newest version.

    version before     rank 0: 7    rank 1: 6 (lost its group during the step)    rank 2: 0 (new)
    synchronize        rank 0 broadcasts weights and moments to all               version 7

A step that loses a rank leaves weights, moments and version of the others as they were. Ranks that
have nevertheless made it are one version ahead, and the ranks behind receive the result.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import nn

from longtail.errors import ClusterError, ProcessGroupError
from longtail.rl.collectives import ProcessGroup, all_gather_scalar
from longtail.rl.optim import Optimizer

if TYPE_CHECKING:
    from longtail.rl.learner import Learner

INCOMPLETE = -1
"""Version of a learner whose synchronization was interrupted: its weights are a mixture."""


@contextmanager
def restored_on_loss(learner: "Learner", *, is_needed: bool) -> Iterator[None]:
    """Restore the learner if the process group is lost; a single update needs no copy for that."""
    copied = (learner.state(), learner.weights().tensors) if is_needed else None
    try:
        yield
    except ProcessGroupError:
        if copied is not None:
            learner.restore(*copied)
        raise


def gather_versions(group: ProcessGroup, version: int) -> list[int]:
    """Return the version of each rank. Raises ClusterError if all are INCOMPLETE."""
    versions = [int(each) for each in all_gather_scalar(group, version)]
    if max(versions) == INCOMPLETE:
        raise ClusterError("the policy is lost; start again from the newest checkpoint")
    return versions


def synchronize(
    group: ProcessGroup, versions: Sequence[int], model: nn.Module, optimizer: Optimizer
) -> None:
    """Broadcast weights and moments from the first rank with the newest version to the others.

    Nothing is sent if all versions are equal. If it raises ProcessGroupError, ranks with the newest
    version still have the same bits; the others are INCOMPLETE.
    """
    source = versions.index(max(versions))
    if min(versions) < versions[source]:
        group.broadcast(source, [parameter.detach() for parameter in model.parameters()])
        optimizer.broadcast_moments(group, source)
