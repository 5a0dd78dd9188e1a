"""Requests from prompts, and groups from graded rollouts.

Owns the ids and the noise keys of requests. A completion is determined by its key and the policy,
so a resumed run repeats the completions of a prompt, and all evaluations use the same noise.

                 request id           key of its noise
    training     p/17@2#3             (seed, prompt "p/17", epoch 2, sample 3)
    evaluation   eval/p/17#1          (seed, "eval", prompt "p/17", sample 1)
"""

from collections.abc import Iterable, Sequence
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


def requests_of(
    taken: Iterable[Taken],
    *,
    samples: int,
    seed: int,
    sampling: SamplingParams,
    with_rows: bool = False,
) -> RequestBatch:
    """Return the requests of a group of completions per prompt, with the noise of its epoch.

    `with_rows`: the completions are episodes, whose environments read the rows.
    """
    requests, prompts = [], []
    for each in taken:
        prompt, name, epoch = each.prompt, each.prompt.prompt_id, each.epoch
        visit = f"eval/{name}" if epoch is None else f"{name}@{epoch}"
        key = ("eval", name) if epoch is None else (name, epoch)
        for sample in range(samples):
            request = Request(
                request_id=f"{visit}#{sample}",
                prompt_tokens=prompt.tokens,
                noise_key=noise_key(seed, *key, sample),
                sampling=sampling,
                group_id=visit,
                row=prompt.data if with_rows else None,
            )
            requests.append(request)
            prompts.append(prompt)
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
