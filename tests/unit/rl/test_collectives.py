"""Dealing work out, and adding up: in threads here, in processes in test_parallel_learner.py."""

import os
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import final
from urllib.parse import urlsplit

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from longtail.errors import ConfigError, TeamError
from longtail.rl.collectives import ALONE, Team, TorchTeam, spread, sum_gradients, tell
from longtail.system.listening import Listening, listening
from support.team_members import PATIENCE_S, free_address


@given(st.lists(st.integers(0, 5000), max_size=40), st.integers(1, 9))
def test_every_micro_batch_is_dealt_out_exactly_once(tokens, members):
    shares = spread(tokens, members)
    assert len(shares) == members
    assert sorted(index for share in shares for index in share) == list(range(len(tokens)))
    assert all(list(share) == sorted(share) for share in shares)


@given(st.lists(st.integers(1, 5000), max_size=40), st.integers(1, 9))
def test_nobody_has_more_to_do_than_another_by_over_one_micro_batch(tokens, members):
    loads = [sum(tokens[index] for index in share) for share in spread(tokens, members)]
    assert max(loads) - min(loads) <= max(tokens, default=0)
    if len(tokens) >= members:
        assert min(loads) > 0


@given(st.lists(st.integers(1, 60), min_size=1, max_size=6), st.integers(1, 3))
def test_the_busiest_member_is_within_the_bound_of_the_best_deal(tokens, members):
    busiest = max(sum(tokens[index] for index in share) for share in spread(tokens, members))

    def most(owners: Sequence[int]) -> int:
        loads = [0] * members
        for owner, count in zip(owners, tokens, strict=True):
            loads[owner] += count
        return max(loads)

    best = min(map(most, product(range(members), repeat=len(tokens))))
    assert 3 * members * busiest <= (4 * members - 1) * best


def test_one_member_computes_everything_in_order():
    assert spread([5, 9, 3], members=1) == [(0, 1, 2)]
    assert spread([5, 9, 3], members=2) == [(1,), (0, 2)]
    assert spread([4, 4], members=4) == [(0,), (1,), (), ()]


def together(
    size: int,
    deed: Callable[[Team], object],
    *,
    address: str | None = None,
    timeout_s: float = PATIENCE_S,
) -> list:
    """Form a team of threads, let each member do the deed, and return what came of it."""
    address = free_address() if address is None else address

    def member(rank: int) -> object:
        team = TorchTeam(rank, size, address, backend="gloo", timeout_s=timeout_s)
        try:
            return deed(team)
        except TeamError as error:
            return str(error)
        finally:
            team.close()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(member, range(size)))


def tensors_of(rank: int) -> list[torch.Tensor]:
    """Of several shapes and dtypes, one of them no contiguous piece of memory."""
    generator = torch.Generator().manual_seed(rank)
    matrix = torch.randn(5, 7, generator=generator, dtype=torch.float64)
    vector = torch.randn(3, generator=generator)
    return [matrix.T, vector, matrix[:, 2].float(), matrix[0, 0].clone()]


@pytest.mark.parametrize("numbers", [2**20, 6, 1], ids="{} together".format)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_sum_is_over_all_members_and_the_same_on_each(size, numbers, monkeypatch):
    monkeypatch.setattr("longtail.rl.collectives._BUNDLE", numbers)

    def deed(team: Team) -> list[torch.Tensor]:
        tensors = tensors_of(team.rank)
        team.sum(tensors)
        return tensors

    sums = together(size, deed)
    expected = [sum(of_rank) for of_rank in zip(*map(tensors_of, range(size)), strict=True)]
    for tensors in sums:
        for ours, others, theirs in zip(tensors, sums[0], expected, strict=True):
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours, others)
            # Up to two additions, in any order: each errs by half a unit of what it adds up to.
            eps = 2 * torch.finfo(ours.dtype).eps
            torch.testing.assert_close(ours, theirs, rtol=0.0, atol=10 * eps)


def test_members_on_one_machine_meet_in_a_file_and_listen_on_loopback_only(tmp_path):
    def deed(team: Team) -> list[Listening]:
        team.sum([torch.ones(3)])
        return listening([os.getpid()])

    known = set(listening([os.getpid()]))
    address = f"file://{tmp_path}/team-1"
    for found in together(3, deed, address=address):
        assert set(found) - known, "gloo's pairs connect to somewhere"
        assert all(each.is_loopback for each in set(found) - known)


@pytest.mark.parametrize("rank", [0, 1])
def test_members_that_never_come_to_a_file_are_not_waited_for_for_ever(rank, tmp_path):
    with pytest.raises(TeamError, match=r"waited in vain for the other members to come"):
        TorchTeam(rank, 2, f"file://{tmp_path}/team-1", backend="gloo", timeout_s=0.5)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_parts_are_gathered_and_sums_are_dealt_out_by_rank(size):
    def deed(team: Team) -> tuple[list[float], list[float], list[float]]:
        whole, part = torch.zeros(size, 2), torch.zeros(1, 2)
        team.gather(whole, torch.full((1, 2), float(team.rank)))
        team.scatter_sum(whole + 10 * team.rank, part)
        return tell(team, team.rank + 0.5), whole[:, 1].tolist(), part[0].tolist()

    made = 10.0 * sum(range(size))
    for rank, (told, gathered, part) in enumerate(together(size, deed)):
        assert told == [other + 0.5 for other in range(size)]
        assert gathered == list(range(size))
        assert part == [size * rank + made] * 2
    whole, part = torch.zeros(3), torch.zeros(3)
    ALONE.gather(whole, torch.ones(3))
    ALONE.scatter_sum(whole, part)
    assert part.tolist() == [1.0] * 3


def test_whoever_is_alone_sums_nothing_up():
    tensors = tensors_of(4)
    ALONE.sum(tensors)
    assert (ALONE.rank, ALONE.size) == (0, 1)
    assert all(torch.equal(a, b) for a, b in zip(tensors, tensors_of(4), strict=True))


def test_a_member_that_is_late_loses_the_team_for_all():
    given_up = threading.Event()

    def deed(team: Team) -> None:
        if team.rank == 1:
            assert given_up.wait(PATIENCE_S)
        try:
            team.sum([torch.zeros(3), torch.zeros(4)])
        finally:
            given_up.set()

    first, second = together(2, deed, timeout_s=3.0)
    assert re.match(r"member 0 of 2 at tcp://\S+ waited in vain for the sum of 7 numbers: ", first)
    assert re.match(r"member 1 of 2 at tcp://\S+ waited in vain for the sum of 7 numbers: ", second)


def test_members_notice_at_once_that_another_has_left():
    def deed(team: Team) -> None:
        if team.rank != 1:
            team.sum([torch.zeros(7)])

    first, second, third = together(3, deed)
    assert second is None
    for message in (first, third):
        assert "waited in vain for the sum of 7 numbers" in message
        assert "timed out" not in message.lower()


@pytest.mark.parametrize("rank", [0, 1])
def test_members_that_never_come_are_not_waited_for_for_ever(rank):
    with pytest.raises(
        TeamError, match=rf"^member {rank} of 2 at tcp://\S+ waited in vain for the other members"
    ):
        TorchTeam(rank, 2, free_address(), backend="gloo", timeout_s=0.5)


@pytest.mark.parametrize("somebody", [False, True])
def test_a_place_where_no_team_came_about_can_be_used_again(somebody):
    address = free_address()
    with ThreadPoolExecutor(1) as pool:
        if somebody:  # looks in, and is gone before the team is formed
            where = urlsplit(address)
            pool.submit(dist.TCPStore, where.hostname, where.port, 2, False)
        with pytest.raises(TeamError, match="in vain for the other members to come") as kept:
            TorchTeam(0, 2, address, backend="gloo", timeout_s=1.0)
    assert together(2, lambda team: team.rank, address=address, timeout_s=10.0) == [0, 1]
    assert kept.value.__cause__ is not None  # alive, but it holds no connection


def test_after_an_error_the_team_is_closed():
    def deed(team: Team) -> str:
        with pytest.raises(TeamError):
            team.sum([torch.zeros(3)])
        team.sum([torch.zeros(3)])
        return "a sum"

    first, second = together(2, lambda team: deed(team) if team.rank == 0 else "left")
    assert "the team is closed; form another one" in first
    assert second == "left"


def test_a_team_that_is_closed_sums_nothing():
    team = TorchTeam(0, 1, free_address(), backend="gloo", timeout_s=PATIENCE_S)
    team.close()
    team.close()
    with pytest.raises(TeamError, match="the team is closed; form another one"):
        team.sum([torch.zeros(2)])


def test_a_backend_that_is_not_built_in_is_refused(monkeypatch):
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: False)
    with pytest.raises(ConfigError, match="use 'gloo'"):
        TorchTeam(0, 1, free_address(), backend="nccl", timeout_s=1.0)


@final
class Scripted(Team):
    """Member 1 of 3; what members 0 and 2 bring is given."""

    def __init__(self, *others: Sequence[torch.Tensor]) -> None:
        self._others = others
        self.sums = 0

    @property
    def rank(self) -> int:
        return 1

    @property
    def size(self) -> int:
        return 3

    @property
    def device(self) -> torch.device:
        raise AssertionError("gradients are where they are")

    def sum(self, tensors: Sequence[torch.Tensor]) -> None:
        self.sums += 1
        for brought in self._others:
            for tensor, other in zip(tensors, brought, strict=True):
                tensor += other

    def take(self, owner: int, tensors: Sequence[torch.Tensor]) -> None:
        raise AssertionError("gradients are added up, nothing else")

    def gather(self, whole: torch.Tensor, own: torch.Tensor) -> None:
        raise AssertionError("gradients are added up, nothing else")

    def scatter_sum(self, whole: torch.Tensor, own: torch.Tensor) -> None:
        raise AssertionError("gradients are added up, nothing else")


def brought(*values: float, void_rank: int | None = None) -> list[torch.Tensor]:
    """Gradients of a linear layer, all of one value, and the flags behind them."""
    flags = torch.zeros(3)
    if void_rank is not None:
        flags[void_rank] = 1.0
    return [torch.full((2, 4), values[0]), torch.full((2,), values[1]), flags]


def test_gradients_of_all_members_are_added_up():
    model = nn.Linear(4, 2)
    model(torch.ones(4)).sum().backward()
    team = Scripted(brought(2.0, 3.0), brought(10.0, 20.0))
    assert sum_gradients(team, model, computed=True, void=False) == []
    assert model.weight.grad is not None
    assert model.bias.grad is not None
    assert model.weight.grad.tolist() == [[13.0] * 4] * 2
    assert model.bias.grad.tolist() == [24.0] * 2


@pytest.mark.parametrize(("void", "expected"), [(False, [2]), (True, [1, 2])])
def test_a_member_without_gradients_adds_zeros_and_says_if_it_had_to_stop(void, expected):
    model = nn.Linear(4, 2)
    team = Scripted(brought(2.0, 3.0), brought(0.0, 1.0, void_rank=2))
    assert sum_gradients(team, model, computed=void, void=void) == expected
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[2.0] * 4] * 2


def test_a_gradient_that_should_be_there_is_missed_before_anything_is_summed():
    # Tensors of different lengths would be added up, and the others would go on with nonsense.
    team = Scripted(brought(2.0, 3.0), brought(2.0, 3.0))
    with pytest.raises(AssertionError, match="no gradient reached weight: was the model packed"):
        sum_gradients(team, nn.Linear(4, 2), computed=True, void=False)
    assert team.sums == 0
