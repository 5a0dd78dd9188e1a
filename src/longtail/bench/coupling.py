"""What the noise is worth to a drafter: accept length with it and without, all else equal.

Chains of the same depth, drafted for the same requests under the same keys; the texts are compared
with those that plain decoding writes in the same run.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from longtail.bench.textmodel import NAME, TextModel, heldout_prompts
from longtail.drafter.checkpoint import load_drafter
from longtail.drafter.eagle_drafter import EagleDrafter
from longtail.engine.acceptance import Acceptance
from longtail.engine.engine import EngineLimits, RolloutEngine
from longtail.engine.speculate import Speculation
from longtail.model import hf
from longtail.sampling import noise_key
from longtail.speculation.drafter import Strategy
from longtail.types import Completion, Request, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class CouplingRow:
    """One temperature.

    Example: CouplingRow(temperature=1.0, entropy=3.7, tokens=6144, coupled=3.3, uncoupled=1.3,
                         coupled_differing=0.0, uncoupled_differing=0.0)
    """

    temperature: float
    entropy: float
    """Nats a token of the distribution sampled: minus the mean logprob of what was written."""
    tokens: int
    """Written by each contestant."""
    coupled: float
    """Accept length, pooled over verify steps."""
    uncoupled: float
    coupled_differing: float
    """Share of the texts that are not those of plain decoding."""
    uncoupled_differing: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Served:
    """What one contestant wrote."""

    texts: Sequence[Completion]
    accept_length: float


def coupling_table(
    model: TextModel,
    prompts: Sequence[tuple[int, ...]] | None = None,
    *,
    temperatures: Sequence[float] = (0.0, 0.6, 1.0),
    max_tokens: int = 192,
    depth: int = 6,
    running: int = 16,
    dtype: torch.dtype = torch.float32,
) -> list[CouplingRow]:
    """Go on from `prompts` (held-out beginnings, where None) at every temperature, three times."""
    prompts = heldout_prompts(model, 32) if prompts is None else prompts
    tokenizer = hf.load_tokenizer(model.target)
    target = hf.load_model(model.target, dtype)
    limits = EngineLimits(
        max_running=running,
        max_step_tokens=max(512, running * (depth + 1)),
        max_len=max(map(len, prompts)) + max_tokens,
    )
    engine = RolloutEngine(target, tokenizer.decode, limits)
    loaded = load_drafter(model.drafter, target, tokenizer, strict_weights=False)
    drafter = EagleDrafter(loaded.layer, target, draft_ids=loaded.draft_ids)
    chain = Strategy(depth=depth, size=depth)
    with_noise = Speculation(drafter=drafter, strategy=chain)
    without = Speculation(drafter=drafter, strategy=chain, coupled=False)
    rows = []
    for temperature in temperatures:
        sampling = SamplingParams(temperature=temperature, max_tokens=max_tokens)
        plain, coupled, uncoupled = (
            _serve(engine, prompts, sampling, each) for each in (None, with_noise, without)
        )
        logprobs = [logprob for text in plain.texts for logprob in text.logprobs]
        rows.append(
            CouplingRow(
                temperature=temperature,
                entropy=abs(sum(logprobs)) / len(logprobs),
                tokens=len(logprobs),
                coupled=coupled.accept_length,
                uncoupled=uncoupled.accept_length,
                coupled_differing=_differing(plain, coupled),
                uncoupled_differing=_differing(plain, uncoupled),
            )
        )
    return rows


def _serve(
    engine: RolloutEngine,
    prompts: Sequence[tuple[int, ...]],
    sampling: SamplingParams,
    speculation: Speculation | None,
) -> _Served:
    acceptance = Acceptance()
    engine.speculate(speculation)
    requests = [
        Request(
            request_id=str(index),
            prompt_tokens=tokens,
            noise_key=noise_key(0, NAME, index),
            sampling=sampling,
        )
        for index, tokens in enumerate(prompts)
    ]
    texts = engine.generate(requests, lambda report: acceptance.add(report.verified))
    return _Served(texts=texts, accept_length=acceptance.overall.mean)


def _differing(one: _Served, other: _Served) -> float:
    pairs = list(zip(one.texts, other.texts, strict=True))
    return sum(a.tokens != b.tokens for a, b in pairs) / len(pairs)
