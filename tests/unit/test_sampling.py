"""Sampling: the noise against its definition in integers, keys and edges; law 2 has the rest."""

import math

import pytest
import torch

from longtail.sampling import draw, gumbel_noise, log_distribution, noise_key
from longtail.types import SamplingParams

KEYS = (8493733112532773764, -2289745138935582735, -4022246430227414452)
RECORDED = (
    (2.6832552, 1.4504684, 0.6503752, 5.1653609),
    (-0.2518785, 1.2220995, -0.3275072, -0.1004009),
    (-0.2198589, 2.2674522, -0.7226610, 0.0863563),
)
M32, M64 = 2**32 - 1, 2**64 - 1


def splitmix64_mix(x: int) -> int:
    """Return the finaliser of Steele, Lea and Flood 2014, in unsigned 64-bit integers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & M64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & M64
    return x ^ (x >> 31)


def noise_by_hand(key: int, position: int, entry: int) -> float:
    """Return g[key, position, entry] in Python's integers, and float64 at the end."""
    row = splitmix64_mix((key + 0x1F83D9ABFB41BD6B) & M64)
    row = splitmix64_mix((row + position * 0x9E3779B97F4A7C15) & M64)
    low, high = row & M32, row >> 32
    x = (entry * 0x9E3779B9 + low) & M32
    x = ((x ^ (x >> 16)) * 0x21F0AAAD + high) & M32
    x = ((x ^ (x >> 15)) * 0xD35A2D97) & M32
    x = (x ^ (x >> 15)) & 0x7FFFFFFF
    return -math.log(-math.log1p(-(x + 0.5) / 2**31))


@pytest.mark.parametrize("key", [0, 1, -1, 2**63 - 1, -(2**63), 0x5EED])
def test_noise_equals_its_definition_in_integers(key):
    positions = [0, 1, 2, 1000, 2**31]
    noise = gumbel_noise(torch.full((5,), key), torch.tensor(positions), 3000)
    for row, position in enumerate(positions):
        for entry in (0, 1, 2, 17, 1023, 2999):
            # float32: u is rounded to 2**-24 near 1, where -log(-log1p(-u)) is about -2.8 and its
            # slope in u below 2**21 / 2.8; clamped at 1 - 2**-24. Elsewhere a few roundings.
            expected = noise_by_hand(key, position, entry)
            tolerance = 1e-5 if expected > -2 else 0.05
            assert float(noise[row, entry]) == pytest.approx(expected, abs=tolerance)


def test_keys_and_noise_never_change():
    """A resumed run must draw the same noise, so these constants never change."""
    assert noise_key(0) == KEYS[0]
    assert noise_key(0, "train/17", 2, 3) == KEYS[1]
    assert noise_key(-1, "", "a\u00e9") == KEYS[2]
    noise = gumbel_noise(torch.tensor(KEYS), torch.tensor([0, 5, 900]), 4)
    torch.testing.assert_close(noise, torch.tensor(RECORDED), rtol=0.0, atol=1e-5)


def test_parts_of_a_key_are_separated():
    keys = {noise_key(1, *parts) for parts in [(12, 3), (1, 23), ("12", "3"), ("123",), (123, "")]}
    assert len(keys) == 4  # 12 and "12" are the same part, on purpose
    assert noise_key(11, 2) != noise_key(1, 12)
    assert all(-(2**63) <= noise_key(seed) < 2**63 for seed in range(100))


def test_exactly_top_k_survive_a_tie():
    logp = log_distribution(torch.zeros(1, 6), SamplingParams(top_k=2))
    assert logp.exp().tolist() == [[0.5, 0.5, 0, 0, 0, 0]]


def test_truncated_logprobs_are_differentiable():
    logits = torch.tensor([[0.3, -0.2, 1.0, -4.0]], dtype=torch.float64, requires_grad=True)
    params = SamplingParams(temperature=0.7, top_k=3)
    logp = log_distribution(logits, params)
    (gradient,) = torch.autograd.grad(logp[0, 0], logits)
    probs = logp.detach().exp()[0]
    # d log p_0 / d z_v = ([v = 0] - p_v) / T for what was kept, 0 for what was not.
    expected = (torch.eye(4, dtype=torch.float64)[0] - probs) / 0.7
    torch.testing.assert_close(gradient[0], expected, rtol=0.0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_probabilities_are_computed_in_float32_or_float64(dtype):
    logp = log_distribution(torch.zeros(1, 3, dtype=dtype), SamplingParams(temperature=0.5))
    assert logp.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_have_no_finite_logprob(temperature, bad):
    """Regression: greedy decoding reported a logprob of 0 for NaN logits."""
    logits = torch.tensor([[0.0, bad, 1.0], [0.0, 1.0, 2.0]])
    drawn = draw(logits, torch.zeros(2, 3), SamplingParams(temperature=temperature))
    assert math.isnan(drawn.logprobs[0])
    assert math.isfinite(drawn.logprobs[1])
