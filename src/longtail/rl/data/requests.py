"""Requests from prompts, and groups from graded rollouts.

Owns the ids and the noise keys of requests. A completion is determined by its key and the policy,
so a resumed run repeats the completions of a prompt, and all evaluations use the same noise.

                 request id           key of its noise
    training     p/17@2#3             (seed, prompt "p/17", epoch 2, sample 3)
    evaluation   eval/p/17#1          (seed, "eval", prompt "p/17", sample 1)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from longtail.rl.data.prompts import Taken
from longtail.sampling import noise_key
from longtail.types import Group, Prompt, Request, Rollout, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestBatch:
    """Requests, and the prompt of each."""

    requests: tuple[Request, ...]
    prompts: tuple[Prompt, ...]


def train_requests(
    taken: Sequence[Taken],
    *,
    samples: int,
    seed: int,
    sampling: SamplingParams,
    with_rows: bool = False,
) -> RequestBatch:
    """Return the requests of a group of completions per prompt, with the noise of its epoch.

    `with_rows`: the completions are episodes, whose environments read the rows.
    """
    requests = [
        Request(
            request_id=f"{visit}#{sample}",
            prompt_tokens=each.prompt.tokens,
            noise_key=noise_key(seed, each.prompt.prompt_id, each.epoch, sample),
            sampling=sampling,
            group_id=visit,
            row=each.prompt.data if with_rows else None,
        )
        for each in taken
        for visit in [f"{each.prompt.prompt_id}@{each.epoch}"]
        for sample in range(samples)
    ]
    prompts = [each.prompt for each in taken for _ in range(samples)]
    return RequestBatch(requests=tuple(requests), prompts=tuple(prompts))


def eval_requests(
    heldout: Sequence[Prompt],
    *,
    samples: int,
    seed: int,
    sampling: SamplingParams,
    with_rows: bool = False,
) -> RequestBatch:
    """Return requests of held-out prompts, always with the same noise; see `train_requests`."""
    requests = [
        Request(
            request_id=f"eval/{prompt.prompt_id}#{sample}",
            prompt_tokens=prompt.tokens,
            noise_key=noise_key(seed, "eval", prompt.prompt_id, sample),
            sampling=sampling,
            group_id=f"eval/{prompt.prompt_id}",
            row=prompt.data if with_rows else None,
        )
        for prompt in heldout
        for sample in range(samples)
    ]
    prompts = [prompt for prompt in heldout for _ in range(samples)]
    return RequestBatch(requests=tuple(requests), prompts=tuple(prompts))


def regroup(rollouts: Sequence[Rollout]) -> list[Group]:
    """Group the rollouts, which are in the order of requests, by prompt and epoch.

    Example: p@0#0, p@0#2, q@0#1 (two gradings failed) make a group of two and a group of one.
    """
    visits = groupby(rollouts, key=lambda each: visit_of(each.completion.request_id))
    groups = [tuple(members) for _, members in visits]
    return [Group(prompt=group[0].prompt, rollouts=group) for group in groups]


def visit_of(request_id: str) -> str:
    """Return what the requests of a group share: prompt and epoch, or an evaluation's prompt."""
    return request_id.rpartition("#")[0]
