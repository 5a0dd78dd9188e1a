"""The noise table returns the keyed noise of each position, after any earlier requests."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longtail.engine.request import ActiveRequest
from longtail.engine.step.sampler import NoiseTable
from longtail.sampling import gumbel_noise, noise_key
from longtail.types import Request

VOCAB = 16


def request(number: int) -> ActiveRequest:
    made = Request(request_id="r", prompt_tokens=(0,), noise_key=noise_key(7, number))
    return ActiveRequest(request=made, tokens=[0] * 3, policy_version=0)


def true_noise(active: ActiveRequest, aheads: Sequence[int]) -> torch.Tensor:
    """By the definition: a token's position is the number of tokens before it."""
    places = [len(active.tokens) + ahead for ahead in aheads]
    keys = torch.tensor([active.request.noise_key] * len(places))
    return gumbel_noise(keys, torch.tensor(places), VOCAB)


# Of a table with hardly any room every other call makes it anew; of a roomy one few do.
@pytest.mark.slow
@pytest.mark.parametrize("max_entries", [1, 2**19])
@settings(max_examples=30)
@given(
    events=st.lists(
        st.tuples(
            st.sets(st.integers(0, 4), min_size=1),
            st.integers(1, 6),
            st.booleans(),
            st.integers(0, 7),
            st.booleans(),
        ),
        max_size=8,
    )
)
def test_each_request_reads_the_noise_of_its_position(max_entries, events):
    noise = NoiseTable(VOCAB, max_entries=max_entries)
    actives = [request(number) for number in range(5)]
    for chosen, depth, drafts, grown, turned in events:
        some = [actives[number] for number in sorted(chosen, reverse=turned)]
        if drafts:
            ahead = noise.for_drafts(some, depth)
            for level in range(depth):
                expected = torch.cat([true_noise(active, [level]) for active in some])
                assert torch.equal(ahead.at_depth(level + 1), expected)
        aheads = [0, depth, depth] if turned else [0]
        found = noise.rows(some, [aheads] * len(some))
        assert torch.equal(found, torch.cat([true_noise(active, aheads) for active in some]))
        for active in some:
            active.tokens += [1] * grown


def test_a_draft_reads_on_while_the_table_is_made_anew():
    noise = NoiseTable(VOCAB, max_entries=1)
    first, second = request(0), request(1)
    ahead = noise.for_drafts([first], 2)
    noise.prepare([second], 5)
    for level in (0, 1):
        assert torch.equal(ahead.at_depth(level + 1), true_noise(first, [level]))
