"""Packing: every token lands once, within the budget, and its neighbours are its own."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longtail.rl.packing import pack_mini_batches, pack_rollouts, pack_shared, plan
from longtail.types import Rollout, SamplingParams
from support import rollouts

LENGTHS = st.lists(st.integers(1, 40), max_size=30)


def rollout(prompt_len: int, completion_len: int, first: int = 0) -> Rollout:
    tokens = range(first, first + prompt_len + completion_len)
    logprobs = tuple(-0.5 * t for t in tokens[prompt_len:])
    return rollouts.rollout(tokens, prompt_len, logprobs=logprobs)


@given(lengths=LENGTHS, budget=st.integers(1, 60))
def test_every_sequence_lands_once_and_the_budget_is_kept(lengths, budget):
    bins = plan(lengths, budget)
    assert sorted(index for members in bins for index in members) == list(range(len(lengths)))
    for members in bins:
        assert sum(lengths[i] for i in members) <= budget or len(members) == 1
    # First fit leaves at most one bin half empty, a bin over the budget counting as full.
    loads = [min(sum(lengths[i] for i in members), budget) for members in bins]
    assert sum(2 * load <= budget for load in loads) <= 1


@given(
    groups=st.lists(
        st.tuples(st.integers(1, 20), st.lists(st.integers(0, 30), min_size=1, max_size=6)),
        max_size=6,
    ),
    budget=st.integers(1, 60),
)
def test_completions_of_a_prompt_share_its_tokens(groups, budget):
    """Laid end to end they are the sequences; each generated token is there once, after its own."""
    sequences, prompts = [], []
    for number, (prompt_len, own) in enumerate(groups):
        for completion, length in enumerate(own):
            first = 1000 * number + 100 * (completion + 1)
            prompt = tuple(range(1000 * number, 1000 * number + prompt_len))
            sequences.append((*prompt, *range(first, first + length)))
            prompts.append(prompt_len)
    generated = []
    for packed, indices in pack_shared(sequences, prompts, budget):
        places = torch.arange(packed.num_tokens) if packed.places is None else packed.places
        assert packed.num_tokens <= budget or len(indices) == 1
        assert packed.cu_seqlens[-1] <= 2 * budget or len(indices) == 1
        for s, index in enumerate(indices):
            span = places[packed.cu_seqlens[s] : packed.cu_seqlens[s + 1]]
            assert tuple(packed.tokens[span].tolist()) == sequences[index]
            assert packed.positions[span].tolist() == list(range(len(span)))
            mask = packed.loss_mask[span].tolist()
            assert mask == [float(p >= prompts[index]) for p in range(len(span))]
            own = span[prompts[index] :]
            assert set(packed.sequence[own].tolist()) <= {s}
            assert packed.previous[own].tolist() == span[prompts[index] - 1 : -1].tolist()
        generated += packed.tokens[packed.loss_mask.bool()].tolist()
        firsts = [sequences[index][0] for index in indices]
        assert (packed.tokens % 1000 == 0).sum() == len(set(firsts))
    own_tokens = [t for s, n in zip(sequences, prompts, strict=True) for t in s[n:]]
    assert sorted(generated) == sorted(own_tokens)


def test_rollouts_carry_their_logprobs_and_advantages_to_their_own_tokens():
    rollouts = [rollout(2, 3, first=10), rollout(1, 1, first=20), rollout(3, 4, first=30)]
    sampling = SamplingParams(max_tokens=8)
    batch = pack_rollouts(rollouts, [0.5, -1.0, 2.0], sampling=sampling, budget=9)
    assert (batch.num_sequences, batch.num_generated) == (3, 8)
    values = {}
    for one in batch.micro_batches:
        columns = (one.packed.tokens, one.rollout_logprobs, one.advantages, one.packed.loss_mask)
        for token, logprob, advantage, mask in zip(*(c.tolist() for c in columns), strict=True):
            values[token] = (logprob, advantage, mask)
    expected = {t: (0.0, 0.0, 0.0) for t in (10, 11, 20, 30, 31, 32)}
    expected |= {t: (-0.5 * t, 0.5, 1.0) for t in (12, 13, 14)}
    expected |= {21: (-10.5, -1.0, 1.0)} | {t: (-0.5 * t, 2.0, 1.0) for t in (33, 34, 35, 36)}
    assert values == expected


def test_a_completion_without_tokens_counts_and_nothing_gives_no_micro_batch():
    batch = pack_rollouts([rollout(2, 0)], [1.0], sampling=SamplingParams(), budget=8)
    assert (batch.num_sequences, batch.num_generated) == (1, 0)
    assert batch.micro_batches[0].packed.loss_mask.tolist() == [0.0, 0.0]
    batch = pack_rollouts([], [], sampling=SamplingParams(), budget=8)
    assert (batch.micro_batches, batch.num_sequences, batch.num_generated) == ((), 0, 0)
    assert pack_mini_batches([], [], sampling=SamplingParams(), budget=8, mini_batches=2) == []


@pytest.mark.parametrize(("count", "sizes"), [(1, [5]), (3, [1, 2, 2]), (9, [1] * 5)])
def test_mini_batches_cut_the_rollouts_in_order(count, sizes):
    rollouts = [rollout(1, 1, first=10 * i) for i in range(5)]
    cut = pack_mini_batches(
        rollouts, [0.0] * 5, sampling=SamplingParams(), budget=100, mini_batches=count
    )
    assert [batch.num_sequences for batch in cut] == sizes
    firsts = torch.cat([batch.micro_batches[0].packed.tokens[::2] for batch in cut])
    assert firsts.tolist() == [0, 10, 20, 30, 40]
