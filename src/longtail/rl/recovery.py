"""Recovery of replicated learners after a lost member: all continue from the newest version.

    version before     member 0: 7    member 1: 7 (lost its team during step 7)    member 2: 0 (new)
    synchronize        member 0 broadcasts weights and moments to all              version 7

A step that loses a member leaves weights, moments and version as they were. The other members may
have made it: they are then one version ahead, and the members behind receive the result.
"""

from collections.abc import Sequence

from torch import nn

from longtail.errors import ClusterError
from longtail.rl.collectives import Team, tell
from longtail.rl.optim import Optimizer

INCOMPLETE = -1
"""Version of a learner whose synchronization was interrupted: its weights are a mixture."""


def versions(team: Team, version: int) -> list[int]:
    """Return the version of each member. Raises ClusterError if all are INCOMPLETE."""
    found = [int(each) for each in tell(team, version)]
    if max(found) == INCOMPLETE:
        raise ClusterError("the policy is lost; start again from the newest checkpoint")
    return found


def synchronize(
    team: Team, versions: Sequence[int], model: nn.Module, optimizer: Optimizer
) -> None:
    """Broadcast weights and moments from the first member with the newest version to the others.

    Nothing is sent if all versions are equal. If it raises TeamError, members with the newest
    version still have the same bits; all others are INCOMPLETE.
    """
    source = versions.index(max(versions))
    if min(versions) < versions[source]:
        team.take(source, [parameter.detach() for parameter in model.parameters()])
        optimizer.broadcast_moments(team, source)
