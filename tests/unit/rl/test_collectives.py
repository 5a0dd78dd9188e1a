"""Collective operations, between threads here and between processes in test_parallel_learner.py."""

import os
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from longtail.errors import ProcessGroupError
from longtail.rl.collectives import ProcessGroup, TorchProcessGroup, balance
from support.rank_processes import PATIENCE_S, free_address
from support.run_processes import listening


@given(st.lists(st.integers(0, 60), max_size=6), st.integers(1, 3))
def test_micro_batches_are_assigned_once_and_nearly_as_evenly_as_possible(tokens, ranks):
    shares = balance(tokens, ranks)
    assert len(shares) == ranks
    assert sorted(index for share in shares for index in share) == list(range(len(tokens)))
    assert all(list(share) == sorted(share) for share in shares)
    assert all(shares) or len(tokens) < ranks or 0 in tokens

    def most(owners: Sequence[int]) -> int:
        loads = [0] * ranks
        for owner, count in zip(owners, tokens, strict=True):
            loads[owner] += count
        return max(loads)

    busiest = max(sum(tokens[index] for index in share) for share in shares)
    best = min(map(most, product(range(ranks), repeat=len(tokens))))
    assert 3 * ranks * busiest <= (4 * ranks - 1) * best


def together(
    size: int, run: Callable[[ProcessGroup], object], *, timeout_s: float = PATIENCE_S
) -> list:
    """Run a function on each rank of a group of threads; return results or error messages."""
    address = free_address()

    def run_rank(rank: int) -> object:
        group = TorchProcessGroup(rank, size, address, backend="gloo", timeout_s=timeout_s)
        try:
            return run(group)
        except ProcessGroupError as error:
            return str(error)
        finally:
            group.close()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run_rank, range(size)))


def tensors_of(rank: int) -> list[torch.Tensor]:
    """Return tensors of several shapes and dtypes, one of them not contiguous."""
    generator = torch.Generator().manual_seed(rank)
    matrix = torch.randn(5, 7, generator=generator, dtype=torch.float64)
    vector = torch.randn(3, generator=generator)
    whole = torch.randint(-(2**61), 2**61, (100,), generator=generator) // 3
    return [matrix.T, vector, matrix[:, 2].float(), matrix[0, 0].clone(), whole]


@pytest.mark.parametrize("size", [1, 3])
def test_a_sum_has_the_same_bits_on_all_ranks_and_is_exact_of_whole_numbers(size):
    def run(group: ProcessGroup) -> list[torch.Tensor]:
        tensors = tensors_of(group.rank)
        group.all_reduce(tensors)
        return tensors

    sums = together(size, run)
    expected = [sum(of_rank) for of_rank in zip(*map(tensors_of, range(size)), strict=True)]
    for tensors in sums:
        for ours, others, theirs in zip(tensors, sums[0], expected, strict=True):
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours, others)
            # Up to two additions, in any order: each errs by half a unit in the last place.
            eps = 2 * torch.finfo(ours.dtype).eps if ours.is_floating_point() else 0.0
            torch.testing.assert_close(ours, theirs, rtol=0.0, atol=10 * eps)


@pytest.mark.parametrize("repeat", range(2))
def test_a_mesh_is_the_default_group_until_a_collective_fails_and_opens_no_port(tmp_path, repeat):
    group = TorchProcessGroup(0, 1, f"file://{tmp_path}/a", backend="gloo", timeout_s=PATIENCE_S)
    known = set(listening([os.getpid()]))
    assert group.mesh().size() == dist.get_world_size() == 1
    assert set(listening([os.getpid()])) <= known
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), group.guarded():
        torch.ones(2, 2) @ torch.ones(3, 3)
    assert group.gather([0.5]).tolist() == [[0.5]]
    with pytest.raises(ProcessGroupError, match="of the shards failed"), group.guarded():
        dist.all_gather_single(torch.zeros(3), torch.zeros(2))
    assert not dist.is_initialized()


@pytest.mark.slow
def test_a_late_rank_ends_the_group_for_all_ranks():
    given_up = threading.Event()

    def run(group: ProcessGroup) -> None:
        if group.rank == 1:
            assert given_up.wait(PATIENCE_S)
        try:
            group.all_reduce([torch.zeros(7)])
        finally:
            given_up.set()

    first, second = together(2, run, timeout_s=3.0)
    assert re.match(r"rank 0 of 2 at tcp://\S+: the sum of 7 numbers failed: ", first)
    assert re.match(r"rank 1 of 2 at tcp://\S+: the sum of 7 numbers failed: ", second)


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "scheme"), [(1, "tcp"), (0, "file")])
def test_the_wait_for_missing_ranks_is_bounded(rank, scheme, tmp_path):
    address = free_address() if scheme == "tcp" else f"file://{tmp_path}/group"
    why = rf"^rank {rank} of 2 at {scheme}://\S+: connecting to the other ranks failed"
    with pytest.raises(ProcessGroupError, match=why):
        TorchProcessGroup(rank, 2, address, backend="gloo", timeout_s=0.5)


def test_ranks_fail_at_once_if_another_has_left_and_the_group_is_closed():
    def run(group: ProcessGroup) -> None:
        if group.rank == 0:
            with pytest.raises(ProcessGroupError, match="the sum of 7 numbers failed") as error:
                group.all_reduce([torch.zeros(7)])
            assert "timed out" not in str(error.value).lower()
        else:
            group.close()
        group.all_reduce([torch.zeros(3)])

    for message in together(2, run):
        assert "the process group is closed; form another one" in message


def test_the_default_group_of_another_part_of_the_process_comes_back(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        others = dist.group.WORLD
        group = TorchProcessGroup(0, 1, f"file://{tmp_path}/meet", backend="gloo", timeout_s=5.0)
        assert group.mesh().size() == 1
        assert dist.group.WORLD is not others
        group.close()
        assert dist.group.WORLD is others
    finally:
        dist.destroy_process_group()
