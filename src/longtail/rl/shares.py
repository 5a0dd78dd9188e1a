"""What a member of a team holds: whole weights, and the optimizer's moments of some parameters.

    parameter      embedding   layers.0.qkv   layers.0.down   norm      3 members, 2 copies
    its keepers      0, 1          1, 2           2, 0         1, 2

Every member has all weights and, after the sum, all gradients. A parameter is updated by its
keepers, who end with the same bits; the first of them, its owner, gives it to the others. So
moments, two thirds of what AdamW adds to the weights, are held `copies` times instead of once a
member (Rajbhandari et al. 2020, stage 1), and as long as fewer than `copies` members are lost at a
time, none are.
"""

import abc
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from longtail.errors import ClusterError
from longtail.rl.collectives import Team, spread, sum_gradients
from longtail.rl.optim import Optimizer


def deal(sizes: Sequence[int], members: int, copies: int) -> list[tuple[int, ...]]:
    """Return the keepers of each parameter of so many numbers, its owner first; 0 copies is all.

    Owners are dealt as even loads of numbers; a parameter is never cut. Who follows the owner by
    rank keeps the other copies.

    Example: deal([100, 60, 50], members=3, copies=2) -> [(0, 1), (1, 2), (2, 0)]
    """
    copies = min(copies, members) if copies else members
    owners = {index: rank for rank, share in enumerate(spread(sizes, members)) for index in share}
    return [
        tuple((owners[index] + further) % members for further in range(copies))
        for index in range(len(sizes))
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubt:
    """An update that this member did not make, not knowing whether others have.

    Example: Doubt(gradients=[p.grad for p in model.parameters()])
    """

    gradients: Sequence[Tensor | None]
    """The team's sum, by parameter."""
    moments: Mapping[str, Tensor] | None = None
    """Before this update, where they were put back further than that since; so for weights."""
    weights: Mapping[str, Tensor] | None = None


class Holding(abc.ABC):
    """What a member has of policy and optimizer, in a team that calls the same methods in turn."""

    @property
    @abc.abstractmethod
    def has_all_weights(self) -> bool:
        """Tell whether they are all here, so that no other member takes any with it."""

    @abc.abstractmethod
    def spare_passes(self, dealt: Sequence[Sequence[int]]) -> int:
        """Return how many passes this member makes only because others have micro-batches left."""

    @abc.abstractmethod
    def sum_gradients(self, *, computed: bool, void: bool) -> list[int]:
        """Hand the optimizer the gradients of all members, added up; return whose are void.

        `computed`: this member has some; `void`: they are of no use, hence nor is the sum.
        """

    @abc.abstractmethod
    def gather(self) -> None:
        """After an update, take the weights that others have updated."""

    @abc.abstractmethod
    def tensors(self, known: Collection[str]) -> dict[str, Tensor]:
        """Copy the moments that are kept here, without those that are known from another member.

        Of a shard, a known name comes again: the rows that follow.
        """


@final
class Shares(Holding):
    """All weights, and a share of the optimizer."""

    def __init__(self, team: Team, model: nn.Module, optimizer: Optimizer, copies: int) -> None:
        self._team, self._model, self._optimizer = team, model, optimizer
        self._parameters = {name: p.detach() for name, p in model.named_parameters()}
        sizes = [parameter.numel() for parameter in self._parameters.values()]
        dealt = deal(sizes, team.size, copies)
        self._keepers = dict(zip(self._parameters, dealt, strict=True))
        self.are_whole = all(len(keepers) == team.size for keepers in dealt)
        """Everybody keeps everything: weights are the same after an update as they stand."""

    @property
    def has_all_weights(self) -> bool:
        """Yes."""
        return True

    def spare_passes(self, dealt: Sequence[Sequence[int]]) -> int:
        """Return 0: who has nothing left waits for the sum."""
        return 0

    def sum_gradients(self, *, computed: bool, void: bool) -> list[int]:
        """Add the gradients of all members up, in place; return whose are void."""
        return sum_gradients(self._team, self._model, computed=computed, void=void)

    def gather(self) -> None:
        """After an update, take the weights that others have updated, from their owners."""
        if not self.are_whole:
            for name, keepers in self._keepers.items():
                self._team.take(keepers[0], [self._parameters[name]])

    def level(self, *, is_current: bool) -> None:
        """Give every member the weights of those who are current, and the moments that it keeps.

        Raises ClusterError if nobody who is current has the moments of some parameter.
        """
        names = list(self._parameters)
        held = self._held(names, is_current=is_current)
        is_any_behind = not held[:, -1].all()
        has_moments = bool(held[:, :-1].any())
        for index, name in enumerate(names):
            # Whoever holds its moments has updated it. Before any update, all who are current do.
            holders = held[:, index if has_moments else -1].nonzero()[:, 0].tolist()
            if not holders:
                raise ClusterError(
                    f"the optimizer's moments of {name} are lost with the workers that kept them "
                    "(learner.moment_copies); start again: the run resumes from its newest "
                    "checkpoint"
                )
            if is_any_behind or not self.are_whole:
                self._team.take(holders[0], [self._parameters[name]])
            if has_moments and not set(self._keepers[name]) <= set(holders):
                moments = self._optimizer.moments(name)
                self._team.take(holders[0], moments)
                if self._team.rank in self._keepers[name]:
                    self._optimizer.take_in(name, moments)
        self.keep_own()

    def tensors(self, known: Collection[str]) -> dict[str, Tensor]:
        """Copy the moments that are kept here, without those known."""
        return self._optimizer.tensors(known)

    def keep_own(self) -> None:
        """Forget moments that are not this member's to keep."""
        rank = self._team.rank
        self._optimizer.keep([name for name, keepers in self._keepers.items() if rank in keepers])

    def _held(self, names: Sequence[str], *, is_current: bool) -> Tensor:
        """Return [members, parameters + 1]: whose moments are held where; last, who is current."""
        rows = torch.zeros(self._team.size, len(names) + 1)
        if is_current:
            held = self._optimizer.held()
            rows[self._team.rank] = torch.tensor([*(name in held for name in names), True])
        self._team.sum([rows])
        return rows
