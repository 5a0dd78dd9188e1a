"""From prompts to requests, and from graded completions back to groups.

Owns the ids and the noise keys of requests. A completion depends on its key alone, so the same
visit of a prompt is answered alike in every sitting of a run, and every evaluation draws with the
same noise.

                 request id           key of its noise
    training     p/17@2#3             (seed, prompt "p/17", epoch 2, sample 3)
    evaluation   eval/p/17#1          (seed, "eval", prompt "p/17", sample 1)
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from longtail.rl.data.prompts import Taken
from longtail.sampling import noise_key
from longtail.types import Group, Prompt, Request, Rollout, SamplingParams

_PROBES, _PROBE_TOKENS = 8, 96
"""So many texts, so long, tell how a drafter does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Requests, and the prompt that each of them asks.

    Example: Asked(requests=(r0, r1, r2, r3), prompts=(p, p, q, q))
    """

    requests: tuple[Request, ...]
    prompts: tuple[Prompt, ...]


def train_requests(
    taken: Sequence[Taken], *, samples: int, seed: int, sampling: SamplingParams
) -> Asked:
    """Ask for a group of completions of each prompt, each in its epoch's own noise."""
    requests = [
        Request(
            request_id=f"{visit}#{sample}",
            prompt_tokens=each.prompt.tokens,
            noise_key=noise_key(seed, each.prompt.prompt_id, each.epoch, sample),
            sampling=sampling,
            group_id=visit,
        )
        for each in taken
        for visit in [f"{each.prompt.prompt_id}@{each.epoch}"]
        for sample in range(samples)
    ]
    prompts = [each.prompt for each in taken for _ in range(samples)]
    return Asked(requests=tuple(requests), prompts=tuple(prompts))


def eval_requests(
    heldout: Sequence[Prompt], *, samples: int, seed: int, sampling: SamplingParams
) -> Asked:
    """Ask for completions of held-out prompts, always in the same noise."""
    requests = [
        Request(
            request_id=f"eval/{prompt.prompt_id}#{sample}",
            prompt_tokens=prompt.tokens,
            noise_key=noise_key(seed, "eval", prompt.prompt_id, sample),
            sampling=sampling,
            group_id=f"eval/{prompt.prompt_id}",
        )
        for prompt in heldout
        for sample in range(samples)
    ]
    prompts = [prompt for prompt in heldout for _ in range(samples)]
    return Asked(requests=tuple(requests), prompts=tuple(prompts))


def probe_requests(prompts: Sequence[Prompt], *, seed: int, sampling: SamplingParams) -> Asked:
    """Ask for the beginnings of a few completions, to see how a drafter does on them."""
    short = replace(sampling, max_tokens=min(sampling.max_tokens, _PROBE_TOKENS))
    return eval_requests(prompts[:_PROBES], samples=1, seed=seed, sampling=short)


def regroup(rollouts: Sequence[Rollout]) -> list[Group]:
    """Collect the rollouts of each visit of a prompt; they come in the order of the requests.

    Example: p@0#0, p@0#2, q@0#1 (two gradings failed) make a group of two and a group of one.
    """
    groups = []
    for _, members in groupby(rollouts, key=_visit):
        group = tuple(members)
        groups.append(Group(prompt=group[0].prompt, rollouts=group))
    return groups


def _visit(rollout: Rollout) -> str:
    return rollout.completion.request_id.rpartition("#")[0]
