"""Captured passes: sizes, static memory, and replays that equal the function."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from longtail.model.graphs import GraphedPass, GraphPool, graph_size
from support.fake_graphs import FakeGraphs

WEIGHTS = torch.randn(3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@given(st.integers(1, 2000))
def test_a_graph_size_is_little_larger_than_its_count(count):
    size = graph_size(count)
    assert count <= size
    assert graph_size(size) == size, "what was rounded is not rounded again"
    assert size <= 8 or size - count < max(8, count / 4)
    assert graph_size(count + 1) >= size


def test_a_few_dozen_graph_sizes_cover_all_counts():
    assert [graph_size(n) for n in (1, 2, 3, 5, 9, 20, 65, 129)] == [1, 2, 4, 8, 16, 24, 80, 160]
    assert len({graph_size(n) for n in range(1, 513)}) <= 32


def make(backend: FakeGraphs, seen: list[int] | None = None) -> GraphedPass:
    def compute(rows: torch.Tensor, numbers: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if seen is not None:
            seen.append(len(rows))
        products = (rows @ WEIGHTS) * numbers[:, None]
        return products, products.cumsum(0)

    padding = [torch.full((3,), torch.nan, dtype=torch.float64), torch.tensor(7)]
    return GraphedPass(GraphPool(backend), compute, padding, max_tokens=40)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(0, 2**31))
def test_a_replay_equals_the_function(counts, seed):
    """The inputs and counts differ from those at the capture; rows of padding are cut off."""
    generator = torch.Generator().manual_seed(seed)
    backend, seen = FakeGraphs(), []
    run = make(backend, seen)
    for count in counts:
        rows = torch.randn(count, 3, generator=generator, dtype=torch.float64)
        numbers = torch.randint(0, 9, (count,), generator=generator)
        products, sums = run(rows, numbers)
        expected = (rows @ WEIGHTS) * numbers[:, None]
        torch.testing.assert_close(products, expected, rtol=0.0, atol=1e-13)
        torch.testing.assert_close(sums, expected.cumsum(0), rtol=0.0, atol=1e-12)
    sizes = {graph_size(count) for count in counts}
    assert backend.num_captures == len(sizes), "captured when first needed, then replayed"
    assert backend.num_replays == len(counts)
    assert sorted(seen) == sorted(2 * list(sizes)), "run for its effects, and to be recorded"


def test_a_pass_without_a_pool_or_with_many_tokens_is_not_captured():
    backend, seen = FakeGraphs(), []
    for pool, counts in ((None, (1, 8)), (GraphPool(backend), (9, 500))):
        run = GraphedPass(pool, lambda x: (x + 1,), [torch.tensor(0.0)], max_tokens=8)
        seen += [len(run(torch.zeros(count))[0]) for count in counts]
    assert (seen, backend.num_captures) == ([1, 8, 9, 500], 0)


def test_graphs_are_captured_again_when_their_key_changes():
    backend = FakeGraphs()
    held = [torch.tensor(1.0)]
    run = GraphedPass(
        GraphPool(backend), lambda x: (x * held[0],), [torch.tensor(0.0)], max_tokens=8
    )
    assert run(torch.ones(1), key=0)[0].tolist() == [1.0]
    held[0] = torch.tensor(5.0)
    assert run(torch.ones(1), key=0)[0].tolist() == [1.0], "a graph reads what it was made with"
    assert run(torch.ones(1), key=1)[0].tolist() == [5.0]
