"""What the noise is worth to a drafter: accept length with it and without, all else equal.

Chains of one depth, drafted for the same requests under the same keys; the texts are compared with
those that plain decoding writes in the same run.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from longtail.bench.rollout.measure import Subject, differing_share
from longtail.engine.engine import RolloutEngine
from longtail.engine.limits import EngineLimits
from longtail.engine.speculation.acceptance import Acceptance
from longtail.engine.speculation.speculator import Speculation
from longtail.sampling import noise_key
from longtail.speculation.strategy import Strategy
from longtail.types import Completion, Request, SamplingParams

_RUNNING = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Coupling:
    """One drafter at one temperature.

    Example: Coupling(drafter="eagle3", temperature=1.0, entropy=3.7, coupled=3.1, uncoupled=1.3,
                      differing_share=0.0)
    """

    drafter: str
    temperature: float
    entropy: float
    """Nats a token of the distribution sampled: minus the mean logprob of what was written."""
    coupled: float
    """Accept length, pooled over verify steps."""
    uncoupled: float
    differing_share: float
    """Of the texts of both, against plain decoding."""


def coupling(
    subject: Subject,
    prompts: Sequence[tuple[int, ...]],
    *,
    temperatures: Sequence[float] = (0.0, 0.6, 1.0),
    max_tokens: int = 256,
    depth: int = 6,
) -> list[Coupling]:
    """Compare coupled with uncoupled chains of every drafter of the subject."""
    found = []
    strategy = Strategy(depth=depth, size=depth)
    for temperature in temperatures:
        sampling = replace(subject.sampling, temperature=temperature, max_tokens=max_tokens)
        plain, _ = answer(subject, prompts, sampling, None)
        for name, make in subject.drafters.items():
            texts: dict[bool, list[Completion]] = {}
            lengths: dict[bool, float] = {}
            for coupled in (True, False):
                own = Speculation.fixed(make(), strategy, coupled=coupled)
                texts[coupled], acceptance = answer(subject, prompts, sampling, own)
                lengths[coupled] = acceptance.overall.mean
            found.append(
                Coupling(
                    drafter=name,
                    temperature=temperature,
                    entropy=_entropy(plain),
                    coupled=lengths[True],
                    uncoupled=lengths[False],
                    differing_share=max(
                        differing_share(_by_name(plain), _by_name(each)) for each in texts.values()
                    ),
                )
            )
    return found


def answer(
    subject: Subject,
    prompts: Sequence[tuple[int, ...]],
    sampling: SamplingParams,
    speculation: Speculation | None,
) -> tuple[list[Completion], Acceptance]:
    """Answer every prompt to the end, and sum up the drafts."""
    longest = max(map(len, prompts)) + sampling.max_tokens
    limits = EngineLimits(max_running=_RUNNING, max_step_tokens=1024, max_len=longest)
    engine = RolloutEngine(subject.model, subject.decode, limits, speculation=speculation)
    acceptance = Acceptance()
    requests = [
        Request(
            request_id=str(index),
            prompt_tokens=prompt,
            noise_key=noise_key(1, "bench", index),
            sampling=sampling,
        )
        for index, prompt in enumerate(prompts)
    ]
    completions = engine.generate(requests, lambda report: acceptance.add(report.verified))
    return completions, acceptance


def _by_name(completions: Sequence[Completion]) -> dict[str, tuple[int, ...]]:
    return {each.request_id: each.tokens for each in completions}


def _entropy(completions: Sequence[Completion]) -> float:
    logprobs = [logprob for each in completions for logprob in each.logprobs]
    return abs(sum(logprobs)) / len(logprobs)
