"""Lay sequences of very different lengths end to end under a token budget, without padding.

With a long tail, padding costs time and memory. Here a micro-batch is a list of whole sequences
whose tokens sum to at most the budget; the completions of a prompt share its tokens.
`model.attention.PackedAttention` keeps attention within each sequence.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
from torch import Tensor

from longtail.rl.data.examples import Example
from longtail.rl.data.requests import visit_of
from longtail.types import MicroBatch, PackedSequences, Rollout, SamplingParams, TrainBatch

_MOST_LAID = 2
"""Most tokens of the whole sequences of a micro-batch, in budgets: attention keeps keys of each."""


def plan(lengths: Sequence[int], budget: int) -> list[tuple[int, ...]]:
    """Assign sequences to micro-batches: first fit, longest first.

    Uses at most 11/9 of the fewest possible micro-batches, plus one (Johnson 1973). A sequence
    longer than the budget gets its own. Deterministic; within a micro-batch the longest come first,
    so sequences of equal length are neighbours, which attention batches.

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


def share_prompts(packed: PackedSequences) -> PackedSequences:
    """Return the sequences with the prompt of neighbours only once.

    It costs nothing but attention to whole sequences: the other work is by token.
    """
    ends, tokens = packed.cu_seqlens, packed.tokens
    lengths = [int((packed.loss_mask[a:b] == 0).sum()) for a, b in pairwise(ends)]
    kept, owner = torch.ones_like(tokens, dtype=torch.bool), torch.arange(ends[-1])
    for (before, other), (start, length) in pairwise(zip(ends, lengths, strict=False)):
        if torch.equal(tokens[before : before + other], tokens[start : start + length]):
            kept[start : start + length] = False
            owner[start : start + length] = owner[before : before + length]
    if kept.all():
        return packed
    return replace(
        packed,
        tokens=tokens[kept],
        positions=packed.positions[kept],
        sequence=packed.sequence[kept],
        loss_mask=packed.loss_mask[kept],
        places=(kept.cumsum(0) - 1)[owner],
    )


def moved(packed: PackedSequences, device: torch.device) -> PackedSequences:
    """Return the sequences with all tensors on a device."""
    values = {each.name: getattr(packed, each.name) for each in fields(packed)}
    tensors: dict[str, Any] = {n: x.to(device) for n, x in values.items() if isinstance(x, Tensor)}
    return replace(packed, **tensors)


def pack_sequences(sequences: Sequence[Example], budget: int) -> list[PackedSequences]:
    """Pack sequences into micro-batches of at most `budget` tokens."""
    places = plan([len(each.tokens) for each in sequences], budget)
    chosen = [[sequences[i] for i in each] for each in places]
    return [lay_out([t.tokens for t in each], [t.prompt_len for t in each]) for each in chosen]


def pack_shared(
    sequences: Sequence[Sequence[int]], prompt_lens: Sequence[int], budget: int
) -> list[tuple[PackedSequences, tuple[int, ...]]]:
    """Pack sequences (prompt, then completion), with the prompt of several completions once.

    With each micro-batch comes the caller's index of each of its sequences.
    """
    units = _units(sequences, prompt_lens, budget)
    costs = [_cost([len(sequences[i]) for i in unit], prompt_lens[unit[0]]) for unit in units]
    packs = []
    for chosen in plan(costs, budget):
        members = tuple(index for unit in chosen for index in units[unit])
        whole = lay_out([sequences[i] for i in members], [prompt_lens[i] for i in members])
        packs.append((share_prompts(whole), members))
    return packs


def _units(
    sequences: Sequence[Sequence[int]], prompt_lens: Sequence[int], budget: int
) -> list[list[int]]:
    """Return completions of one prompt that are packed together, longest first."""
    by_prompt: dict[tuple[int, ...], list[list[int]]] = {}
    for index in sorted(range(len(sequences)), key=lambda i: (-len(sequences[i]), i)):
        prompt = tuple(sequences[index][: prompt_lens[index]])
        units = by_prompt.setdefault(prompt, [[]])
        longer = [*units[-1], index]
        if units[-1] and _cost([len(sequences[i]) for i in longer], len(prompt)) > budget:
            units.append([index])
        else:
            units[-1] = longer
    return [unit for units in by_prompt.values() for unit in units]


def _cost(lengths: Sequence[int], prompt_len: int) -> int:
    """Return the tokens of the budget that sequences of one prompt take together."""
    laid = sum(lengths)
    return max(laid - (len(lengths) - 1) * prompt_len, -(-laid // _MOST_LAID))


def pack_group(
    rollouts: Sequence[Rollout], advantages: Sequence[float], *, budget: int, keep_idle: bool = True
) -> list[MicroBatch]:
    """Pack the graded rollouts of one prompt, each with its advantage; no other group takes part.

    Without `keep_idle` rollouts of advantage 0 are left out, which changes no gradient of a loss of
    `LOSSES` without KL term. They are often the longest.
    """
    kept = [i for i, advantage in enumerate(advantages) if advantage or keep_idle]
    packs = pack_shared(
        [rollouts[i].prompt_tokens + rollouts[i].completion.tokens for i in kept],
        [len(rollouts[i].prompt_tokens) for i in kept],
        budget,
    )
    made = []
    for number, (packed, members) in enumerate(packs):
        own, written = [kept[i] for i in members], packed.loss_mask.bool()
        logprobs = [value for i in own for value in rollouts[i].completion.logprobs]
        rollout_logprobs = torch.zeros(packed.num_tokens, dtype=torch.float64)
        rollout_logprobs[written] = torch.tensor(logprobs, dtype=torch.float64)
        packed = _without_observed(packed, [rollouts[i] for i in own])
        generated = packed.loss_mask.bool()
        by_sequence = torch.tensor([advantages[i] for i in own], dtype=torch.float64)
        made.append(
            MicroBatch(
                name=f"{visit_of(rollouts[0].completion.request_id)}/{number}",
                packed=packed,
                rollout_logprobs=rollout_logprobs,  # 0 in prompts, as advantages
                advantages=by_sequence[packed.sequence] * generated,
            )
        )
    return made


def _without_observed(packed: PackedSequences, rollouts: Sequence[Rollout]) -> PackedSequences:
    """Return the sequences without loss on what environments wrote."""
    observed = [
        start + len(each.prompt_tokens) + place
        for start, each in zip(packed.cu_seqlens, rollouts, strict=False)
        if each.completion.episode is not None
        for span in each.completion.episode.observed
        for place in range(*span)
    ]
    if not observed:
        return packed
    mask, places = packed.loss_mask.clone(), torch.tensor(observed, dtype=torch.int64)
    mask[places if packed.places is None else packed.places[places]] = 0
    return replace(packed, loss_mask=mask)


def pack_rollouts(
    rollouts: Sequence[Rollout],
    advantages: Sequence[float],
    *,
    sampling: SamplingParams,
    budget: int,
    keep_idle: bool = True,
) -> TrainBatch:
    """Pack graded rollouts, each with its advantage, into one batch of the learner.

    Every group is packed by itself; the tokens of what `pack_group` leaves out are counted.
    """
    groups: dict[str, list[tuple[Rollout, float]]] = {}
    for rollout, advantage in zip(rollouts, advantages, strict=True):
        visit = visit_of(rollout.completion.request_id)
        groups.setdefault(visit, []).append((rollout, advantage))
    packs = [
        pack_group(*zip(*members, strict=True), budget=budget, keep_idle=keep_idle)
        for members in groups.values()
    ]
    return TrainBatch(
        micro_batches=tuple(chain.from_iterable(packs)),
        sampling=sampling,
        num_sequences=len(rollouts),
        num_generated=sum(rollout.completion.num_generated for rollout in rollouts),
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
    """Divide a step's rollouts into mini-batches of nearly equal number, and pack each.

    Rollouts keep their order, so groups stay together if the numbers divide. There are at most as
    many mini-batches as rollouts.

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
