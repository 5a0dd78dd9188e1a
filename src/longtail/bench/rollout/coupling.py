"""Accept lengths of fixed chains: with and without shared noise, early and late in long texts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from longtail.bench.common.play import differing_share
from longtail.bench.common.process import Log
from longtail.bench.rollout.subjects import (
    Subject,
    eagle_maker,
    hailstones,
    requests_for,
    tiny_reasoner,
    tiny_sampling,
    tiny_subject,
)
from longtail.engine.engine import RolloutEngine
from longtail.engine.limits import EngineLimits
from longtail.engine.speculation.acceptance import POSITIONS, Acceptance
from longtail.engine.speculation.speculator import Speculation
from longtail.speculation.strategy import Strategy
from longtail.types import Completion, SamplingParams

_RUNNING = 16
_CHAIN = Strategy(depth=6, size=6)
_LONG_STEPS = 80
"""Steps of a walk whose careful solution has well over a thousand tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coupling:
    """One drafter at one temperature.

    Example: Coupling(drafter="eagle3", temperature=1.0, entropy=3.7, coupled=3.1, uncoupled=1.3,
                      differing_share=0.0)
    """

    drafter: str
    temperature: float
    entropy: float
    """Nats per token of the sampled distribution: minus the mean logprob of the tokens."""
    coupled: float
    """Accept length with shared noise."""
    uncoupled: float
    differing_share: float
    """Share of the texts of both that differ from plain decoding's."""


def coupling(
    subject: Subject,
    prompts: Sequence[tuple[int, ...]],
    temperatures: Sequence[float] = (0.0, 0.6, 1.0),
    max_tokens: int = 256,
) -> list[Coupling]:
    """Compare coupled with uncoupled chains of every drafter of the subject."""
    found = []
    for temperature in temperatures:
        sampling = replace(subject.sampling, temperature=temperature, max_tokens=max_tokens)
        plain, _ = answer(subject, prompts, sampling, None)
        for name, make in subject.drafters.items():
            texts: dict[bool, list[Completion]] = {}
            lengths: dict[bool, float] = {}
            for coupled in (True, False):
                speculation = Speculation.fixed(make(), _CHAIN, coupled=coupled)
                texts[coupled], acceptance = answer(subject, prompts, sampling, speculation)
                lengths[coupled] = acceptance.overall.mean
            found.append(
                Coupling(
                    drafter=name,
                    temperature=temperature,
                    entropy=_entropy(plain),
                    coupled=lengths[True],
                    uncoupled=lengths[False],
                    differing_share=max(
                        differing_share(_tokens(plain), _tokens(each)) for each in texts.values()
                    ),
                )
            )
    return found


def length_decay(dtype_name: str, log: Log) -> dict[str, Any]:
    """Measure accept length early and late in long texts, with both kinds of window."""
    target, layers = tiny_reasoner(dtype_name, ("eagle1", "eagle3"))
    prompts = hailstones(target.tokenizer, at_least=_LONG_STEPS)[::4]
    subject = tiny_subject("tiny", target, target.model, {})
    found: dict[str, Any] = {}
    for name, layer in layers.items():
        for window, label in ((None, "bounded"), (0, "full")):
            drafter = eagle_maker(layer, target.model, window)()
            speculation = Speculation.fixed(drafter, _CHAIN)
            sampling = tiny_sampling(target, max_tokens=2048)
            _, acceptance = answer(subject, prompts, sampling, speculation)
            by_position = dict(zip(POSITIONS, acceptance.by_position(), strict=True))
            early, late = by_position[50], by_position[1000]
            found.setdefault(name, {})[label] = {
                "at_100": early.mean,
                "at_1000": late.mean,
                "ratio": late.mean / early.mean if early.num_verified else None,
                "num_verified": [early.num_verified, late.num_verified],
            }
            log(f"length: {name}, {label} window")
    return found


def answer(
    subject: Subject,
    prompts: Sequence[tuple[int, ...]],
    sampling: SamplingParams,
    speculation: Speculation | None,
) -> tuple[list[Completion], Acceptance]:
    """Complete every prompt; return the completions and the acceptance of the drafts."""
    longest = max(map(len, prompts)) + sampling.max_tokens
    limits = EngineLimits(max_running=_RUNNING, max_step_tokens=1024, max_len=longest)
    engine = RolloutEngine(subject.model, subject.decode, limits, speculation=speculation)
    acceptance = Acceptance()
    completions = engine.generate(
        requests_for(prompts, sampling, seed=1), lambda report: acceptance.add(report.verified)
    )
    return completions, acceptance


def _tokens(completions: Sequence[Completion]) -> dict[str, tuple[int, ...]]:
    return {each.request_id: each.tokens for each in completions}


def _entropy(completions: Sequence[Completion]) -> float:
    logprobs = [logprob for each in completions for logprob in each.logprobs]
    return abs(sum(logprobs)) / len(logprobs)
