"""Lay sequences of very different lengths end to end under a token budget, without padding.

A long tail makes padding expensive twice: in time and in memory. Here a micro-batch is a list of
whole sequences whose tokens sum to at most the budget. It owns the layout only: who may see whom
is `model.attention.PackedAttention`'s business, what a token is worth is `rl.advantage`'s.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise

import torch

from longtail.types import MicroBatch, PackedSequences, Rollout, SamplingParams, TrainBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """One micro-batch of packed sequences, and which of the given sequences it holds.

    Example: sequences of lengths 2, 6, 3 under a budget of 8 give indices (1, 0), then (2,).
    """

    packed: PackedSequences
    indices: tuple[int, ...]
    """indices[s] is the place in the caller's list of sequence s of `packed`."""


def plan(lengths: Sequence[int], budget: int) -> list[tuple[int, ...]]:
    """Choose which sequences share a micro-batch: first fit, longest first.

    Uses at most 11/9 of the fewest possible bins, plus one (Johnson 1973). A sequence longer than
    the budget gets a bin of its own. Deterministic; within a bin the longest come first, so equal
    lengths are neighbours, which attention batches.

    Example: plan([2, 6, 3, 9], budget=8) -> [(3,), (1, 0), (2,)]
    """
    assert budget >= 1, f"a packing budget of {budget} tokens holds nothing"
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fits = next((b for b, left in enumerate(room) if lengths[index] <= left), None)
        if fits is None:
            bins.append([index])
            room.append(budget - lengths[index])
        else:
            bins[fits].append(index)
            room[fits] -= lengths[index]
    return [tuple(members) for members in bins]


def lay_out(sequences: Sequence[Sequence[int]], prompt_lens: Sequence[int]) -> PackedSequences:
    """Lay sequences end to end; tokens from `prompt_lens[s]` on carry the loss.

    Every sequence starts with at least one prompt token: nothing predicts a first token.
    """
    lengths = [len(sequence) for sequence in sequences]
    assert all(
        1 <= prompt <= length for prompt, length in zip(prompt_lens, lengths, strict=True)
    ), "a sequence starts with at least one token that carries no loss"
    repeats = torch.tensor(lengths, dtype=torch.int64)
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int64)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), repeats)
    positions = torch.arange(int(starts[-1])) - starts[sequence]
    prompts = torch.tensor(list(prompt_lens), dtype=torch.int64)[sequence]
    return PackedSequences(
        tokens=torch.tensor(list(chain.from_iterable(sequences)), dtype=torch.int64),
        positions=positions,
        sequence=sequence,
        cu_seqlens=tuple(starts.tolist()),
        loss_mask=(positions >= prompts).to(torch.float32),
    )


def moved(packed: PackedSequences, device: torch.device) -> PackedSequences:
    """Return the same sequences on a device."""
    return replace(
        packed,
        tokens=packed.tokens.to(device),
        positions=packed.positions.to(device),
        sequence=packed.sequence.to(device),
        loss_mask=packed.loss_mask.to(device),
    )


def pack(sequences: Sequence[Sequence[int]], prompt_lens: Sequence[int], budget: int) -> list[Pack]:
    """Pack sequences (prompt, then what is learned) into micro-batches of at most `budget` tokens.

    Example: pack([(7, 8, 9, 2), (7, 2)], prompt_lens=(2, 1), budget=8) gives one Pack whose
    `packed` is the example of `types.PackedSequences`, with indices (0, 1).
    """
    return [
        Pack(
            packed=lay_out([sequences[i] for i in members], [prompt_lens[i] for i in members]),
            indices=members,
        )
        for members in plan([len(sequence) for sequence in sequences], budget)
    ]


def pack_rollouts(
    rollouts: Sequence[Rollout],
    advantages: Sequence[float],
    *,
    sampling: SamplingParams,
    budget: int,
    keep_idle: bool = True,
) -> TrainBatch:
    """Pack graded rollouts, each with its advantage, into one batch of the learner.

    Without `keep_idle`, rollouts whose advantage is 0 are counted and not computed: no loss has a
    gradient there, unless a KL term gives it one. They are those of groups in which all did equally
    well, and often the longest of all. No rollouts make a batch without micro-batches.
    """
    assert len(rollouts) == len(advantages), (
        f"{len(rollouts)} rollouts with {len(advantages)} advantages"
    )
    taught = [i for i, advantage in enumerate(advantages) if advantage or keep_idle]
    packs = pack(
        [rollouts[i].prompt.tokens + rollouts[i].completion.tokens for i in taught],
        [len(rollouts[i].prompt.tokens) for i in taught],
        budget,
    )
    return TrainBatch(
        micro_batches=tuple(
            _micro_batch(
                one.packed,
                [rollouts[taught[i]] for i in one.indices],
                [advantages[taught[i]] for i in one.indices],
            )
            for one in packs
        ),
        sampling=sampling,
        num_sequences=len(rollouts),
        num_generated=sum(len(rollout.completion.tokens) for rollout in rollouts),
    )


def pack_mini_batches(
    rollouts: Sequence[Rollout],
    advantages: Sequence[float],
    *,
    sampling: SamplingParams,
    budget: int,
    mini_batches: int,
    keep_idle: bool = True,
) -> list[TrainBatch]:
    """Cut a step's rollouts into runs of nearly equal number, one optimizer update each; pack each.

    Rollouts keep their order, so groups stay together where the numbers divide. There are never
    more mini-batches than rollouts.

    Example: 8 rollouts in 3 mini-batches are rollouts 0-1, 2-4 and 5-7.
    """
    count = min(mini_batches, len(rollouts))
    cuts = [index * len(rollouts) // max(count, 1) for index in range(count + 1)]
    return [
        pack_rollouts(
            rollouts[a:b], advantages[a:b], sampling=sampling, budget=budget, keep_idle=keep_idle
        )
        for a, b in pairwise(cuts)
    ]


def _micro_batch(
    packed: PackedSequences, rollouts: Sequence[Rollout], advantages: Sequence[float]
) -> MicroBatch:
    """Lay logprobs and advantages over the tokens they belong to; prompts hold 0."""
    generated = packed.loss_mask.bool()
    logprobs = chain.from_iterable(rollout.completion.logprobs for rollout in rollouts)
    rollout_logprobs = torch.zeros(packed.num_tokens, dtype=torch.float64)
    rollout_logprobs[generated] = torch.tensor(list(logprobs), dtype=torch.float64)
    by_sequence = torch.tensor(list(advantages), dtype=torch.float64)
    return MicroBatch(
        packed=packed,
        rollout_logprobs=rollout_logprobs,
        advantages=by_sequence[packed.sequence] * generated,
    )
