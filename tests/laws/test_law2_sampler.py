"""Law 2: the sampler samples p, the distribution after temperature and truncation.

Every statistical test states its false-alarm probability: 1e-9, were keys drawn at random. Keys are
fixed, so a test that passes once passes always; the last tests show that small errors are caught.
"""

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from longtail.engine.engine import RolloutEngine
from longtail.engine.request import EngineLimits
from longtail.engine.speculation.speculator import Speculation
from longtail.sampling import draw, gumbel_noise, noise_key
from longtail.speculation.strategy import Strategy
from longtail.speculation.tree import DraftTree, cut_depth
from longtail.types import SamplingParams
from support.drafters import WatchfulDrafter
from support.engine_requests import request_of
from support.fakes import markov_model

FALSE_ALARM = 1e-9
Z = 6.11
"""Two-sided standard normal quantile of FALSE_ALARM."""
EULER = 0.5772156649015329
# Two clear favourites, a tie, a long tail, one token that is practically impossible.
LOGITS = (2.0, 1.4, 0.9, 0.9, 0.3, 0.0, -0.4, -1.0, -1.1, -2.0, -2.5, -60.0)
TRUNCATIONS = (
    {},
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.2},
    {"top_k": 8, "top_p": 0.9, "min_p": 0.1},
)


def truncated(logits: Sequence[float], params: SamplingParams) -> list[float]:
    """The definition in plain Python: ranks, running sums, and a division at the end."""
    weights = [math.exp(x / params.temperature) for x in logits]
    ranked = sorted(range(len(weights)), key=lambda v: -weights[v])
    if params.top_k:
        ranked = ranked[: params.top_k]
    total, running, kept = sum(weights[v] for v in ranked), 0.0, []
    for v in ranked:
        if running < params.top_p * total or params.top_p == 1.0:
            kept.append(v)
        running += weights[v]
    kept = [v for v in kept if weights[v] >= params.min_p * weights[ranked[0]]]
    total = sum(weights[v] for v in kept)
    return [weights[v] / total if v in kept else 0.0 for v in range(len(weights))]


def chi_square_p(counts: Sequence[int], probs: Sequence[float]) -> float:
    """Probability of a deviation at least this large (Pearson; rare tokens in one cell)."""
    number, statistic, cells, rare = sum(counts), 0.0, 0, [0.0, 0.0]
    for count, prob in zip(counts, probs, strict=True):
        expected = number * prob
        assert prob > 0 or count == 0, "drew a token of probability 0"
        if expected < 20:
            rare[0], rare[1] = rare[0] + count, rare[1] + expected
        else:
            statistic, cells = statistic + (count - expected) ** 2 / expected, cells + 1
    if rare[1] > 1e-9:
        rare[1] = max(rare[1], 1.0)
        statistic, cells = statistic + (rare[0] - rare[1]) ** 2 / rare[1], cells + 1
    halves = torch.tensor([(cells - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(*halves)) if cells > 1 else 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "extreme",
    [
        {"top_p": 1e-46},  # 0 in float32
        {"top_p": 5e-324},
        {"top_p": 1e-50, "top_k": 10**30, "min_p": 1 - 1e-16},
        {"top_k": 1, "top_p": 1e-46, "temperature": 1e-3},
        {"min_p": 1 - 1e-16, "temperature": 1e300},
    ],
    ids=str,
)
def test_truncation_always_keeps_the_best_entry(extreme, dtype: torch.dtype) -> None:
    """top_p = 1e-46 left nothing to draw, and every logprob was no number."""
    logits = torch.tensor([LOGITS, [0.0] * len(LOGITS), [1e4] + [-1e4] * 11], dtype=dtype)
    noise = gumbel_noise(torch.arange(3), torch.arange(3), len(LOGITS)).to(dtype)
    drawn = draw(logits, noise, SamplingParams(**extreme))
    assert drawn.logprobs.isfinite().all()
    if extreme.get("top_p"):
        assert drawn.tokens.tolist() == [0, 0, 0]
        assert drawn.logprobs.tolist() == [0.0, 0.0, 0.0]


def many_draws(params: SamplingParams) -> list[int]:
    """Counts of each token over keys and positions, both of them varied."""
    keys = torch.tensor([noise_key(0, "law 2", i) for i in range(400)])
    positions = torch.arange(50).repeat(len(keys))
    noise = gumbel_noise(keys.repeat_interleave(50), positions, len(LOGITS))
    logits = torch.tensor(LOGITS).expand(len(noise), -1)
    return draw(logits, noise, params).tokens.bincount(minlength=len(LOGITS)).tolist()


def uniforms(keys: Tensor, positions: Tensor) -> Tensor:
    """Noise brought back to standardised uniforms (mean 0, variance 1), float64."""
    uniform = (-(-gumbel_noise(keys, positions, 1024).double()).exp()).exp()
    return (uniform - 0.5) * math.sqrt(12)


@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=str)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_tokens_follow_the_truncated_distribution(temperature, truncation):
    params = SamplingParams(temperature=temperature, **truncation)
    assert chi_square_p(many_draws(params), truncated(LOGITS, params)) > FALSE_ALARM


@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=str)
def test_the_logprob_of_a_draw_is_the_log_of_its_probability(truncation):
    params = SamplingParams(temperature=0.7, **truncation)
    noise = gumbel_noise(torch.arange(500), torch.arange(500), len(LOGITS))
    drawn = draw(torch.tensor(LOGITS, dtype=torch.float64).expand(500, -1), noise, params)
    probs = truncated(LOGITS, params)
    assert drawn.logprobs.tolist() == pytest.approx(
        [math.log(probs[token]) for token in drawn.tokens.tolist()], abs=1e-12
    )


def test_greedy_takes_the_best_token_whatever_the_noise():
    logits = torch.randn(200, 33, generator=torch.Generator().manual_seed(0))
    noise = 100 * gumbel_noise(torch.arange(200), torch.arange(200), 33)
    drawn = draw(logits, noise, SamplingParams(temperature=0.0, top_k=3, top_p=0.5))
    assert drawn.tokens.tolist() == [row.index(max(row)) for row in logits.tolist()]
    assert drawn.logprobs.tolist() == [0.0] * 200


CHAIN = torch.randn(6, 6, generator=torch.Generator().manual_seed(1)).double()
"""Scores of the next token of a Markov chain, by the last."""


class NoiseDrafter(WatchfulDrafter):
    """Drafts chains of the argmax of the target's noise."""

    def draft(self, requests, strategy, noise):
        levels = [noise.at_depth(at).argmax(-1).tolist() for at in range(1, strategy.depth + 1)]
        shape = {"parents": tuple(range(strategy.depth)), "margins": (1.0,) * strategy.depth}
        return [
            cut_depth(DraftTree(tokens=tokens, **shape), each.max_depth)
            for tokens, each in zip(zip(*levels, strict=True), requests, strict=True)
        ]


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [False, True])
def test_the_whole_engine_samples_a_known_markov_chain(drafts):
    """Through submit, prefill, decode and groups: transitions have their exact probabilities.

    So, too, where drafts are made of the very noise that tokens are drawn with: which of them are
    accepted depends on the noise, and it could favour tokens that the drafter believes in. This one
    believes in nothing: it drafts the argmax of the noise.
    """
    params = {"temperature": 1.3, "top_k": 5, "min_p": 0.02, "max_tokens": 100}
    engine = RolloutEngine(
        markov_model(CHAIN, torch.float32),
        lambda tokens: "",
        EngineLimits(max_running=80, max_step_tokens=400, max_len=128),
    )
    drafter = NoiseDrafter()
    if drafts:
        engine.speculate(Speculation.fixed(drafter, Strategy(depth=3)))
    requests = [
        request_of(str(i), (1, i // 8 % 6), noise_key(5, "chain", i), str(i // 8), **params)
        for i in range(160)
    ]
    completions = engine.generate(requests)
    counts = torch.zeros(6, 6, dtype=torch.int64)
    for request, completion in zip(requests, completions, strict=True):
        for last, token in itertools.pairwise((*request.prompt_tokens[1:], *completion.tokens)):
            counts[last, token] += 1
    assert int(counts.sum()) == 160 * 100
    for last in range(6):
        probs = truncated(CHAIN[last].tolist(), SamplingParams(**params))
        assert chi_square_p(counts[last].tolist(), probs) > FALSE_ALARM
    if drafts:  # coupled, they are right more often than 1 in 6
        assert 0.2 < drafter.num_accepted / drafter.num_nodes < 1.0


def test_noise_has_the_gumbel_distribution():
    noise = gumbel_noise(torch.arange(1000), torch.arange(1000) * 7, 1000).double().flatten()
    number = noise.numel()
    assert bool(noise.isfinite().all())
    # Mean gamma, variance pi^2/6, excess kurtosis 12/5: standard errors follow.
    variance = math.pi**2 / 6
    assert abs(float(noise.mean()) - EULER) < Z * math.sqrt(variance / number)
    spread = variance * math.sqrt((12 / 5 + 2) / number)
    assert abs(float(noise.var()) - variance) < Z * spread
    # Dvoretzky-Kiefer-Wolfowitz with Massart's constant: P(sup |F_n - F| > d) <= 2 exp(-2 n d^2).
    exact = (-(-noise.sort().values).exp()).exp()
    steps = torch.arange(number, dtype=torch.float64)
    distance = float(torch.maximum(exact - steps / number, (steps + 1) / number - exact).max())
    assert distance < math.sqrt(math.log(2 / FALSE_ALARM) / (2 * number))
    # The upper tail decides the argmax over a large vocabulary: counts beyond x are binomial.
    for x in (3.0, 6.0, 9.0):
        expected = number * -math.expm1(-math.exp(-x))
        assert abs(int((noise > x).sum()) - expected) < Z * math.sqrt(expected) + Z


@pytest.mark.parametrize("lag", [1, 2, 16, 256])
def test_noise_of_neighbouring_entries_positions_and_keys_is_uncorrelated(lag):
    keys, positions = torch.arange(700), torch.full((700,), 31)
    base = uniforms(keys, positions)
    others = {
        "vocabulary": (base[:, :-lag], base[:, lag:]),
        "position": (base, uniforms(keys, positions + lag)),
        "key": (base, uniforms(keys + lag, positions)),
        "high bit of the key": (base, uniforms(keys ^ (1 << (62 - lag % 30)), positions)),
        "position against key": (base, uniforms(positions + lag, keys)),
        "diagonal": (base[:, :-lag], uniforms(keys, positions + lag)[:, lag:]),
    }
    for name, (one, other) in others.items():
        # Products of independent standardised uniforms have mean 0 and variance 1.
        z = float((one * other).mean()) * math.sqrt(one.numel())
        assert abs(z) < Z, name


@pytest.mark.parametrize(
    ("sampled", "claimed"),
    [
        (SamplingParams(temperature=1.0), SamplingParams(temperature=1.1)),
        (SamplingParams(top_p=0.8), SamplingParams(top_p=0.9)),
        (SamplingParams(), SamplingParams(min_p=0.015)),
    ],
    ids=str,
)
def test_a_sampler_that_is_slightly_wrong_would_be_caught(sampled, claimed):
    counts, probs = many_draws(sampled), truncated(LOGITS, claimed)
    impossible = any(count and not prob for count, prob in zip(counts, probs, strict=True))
    assert impossible or chi_square_p(counts, probs) < FALSE_ALARM
