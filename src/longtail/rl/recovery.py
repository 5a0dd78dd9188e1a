"""Recovery of replicated learners from a lost rank: all continue from the newest version.

    version before     rank 0: 7    rank 1: 6 (lost its group during the step)    rank 2: 0 (new)
    synchronize        rank 0 broadcasts weights and moments to all               version 7

A step that loses a rank leaves weights, moments and version of the others as they were. Ranks that
have nevertheless made it are one version ahead, and the ranks behind receive the result.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from longtail.errors import ClusterError, ProcessGroupError
from longtail.rl.collectives import ProcessGroup, all_gather_scalar
from longtail.rl.optim import Optimizer

INCOMPLETE = -1
"""Version of a learner whose synchronization was interrupted: its weights are a mixture."""


@contextmanager
def undone_on_loss(undo: Callable[[], None] | None) -> Iterator[None]:
    """Call `undo`, if there is one, when the process group is lost."""
    try:
        yield
    except ProcessGroupError:
        if undo is not None:
            undo()
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
