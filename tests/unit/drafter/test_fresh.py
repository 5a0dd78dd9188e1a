"""A renewed draft vocabulary never covers less."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from longtail.drafter.eagle.fresh import MIN_RISE, coverage, renewed_ids


@st.composite
def cases(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids of a draft vocabulary, and counts of the tokens of some texts."""
    ids = draw(st.sets(st.integers(0, 40), min_size=1, max_size=12))
    counts = draw(st.lists(st.integers(0, 30), max_size=30))
    return torch.tensor(sorted(ids)), torch.tensor(counts, dtype=torch.int64)


@given(cases())
def test_a_renewed_vocabulary_covers_most_and_keeps_what_is_as_common(case):
    ids, counts = case
    best = counts.sort(descending=True).values[: len(ids)].sum().item()
    total = max(int(counts.sum()), 1)
    found = renewed_ids(ids, counts)
    if found is None:
        covered = coverage(ids, counts) * total if counts.sum() else 0
        assert best - covered <= MIN_RISE * total + 1e-9
        return
    assert found.tolist() == sorted(set(found.tolist()))
    assert len(found) == len(ids)
    assert coverage(found, counts) == best / total
    seen = [int(counts[token]) if token < len(counts) else 0 for token in found.tolist()]
    dropped = [
        int(counts[token]) if token < len(counts) else 0
        for token in set(ids.tolist()) - set(found.tolist())
    ]
    new = [int(counts[token]) for token in set(found.tolist()) - set(ids.tolist())]
    assert not dropped or not new or max(dropped) < min(new)
    assert not dropped or max(dropped) <= min(seen)
