"""draws.c draws the tokens of the definition, for any logits, keys and truncation."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from longtail.model.kernels import native
from longtail.model.kernels.draws import NativeDraws, select_draws
from longtail.sampling import Drawn, draw_rows, entry_noise, gumbel_noise, noise_key
from longtail.types import SamplingParams

pytestmark = pytest.mark.skipif(
    native.functions(torch.float32) is None, reason=str(native.unavailable_because())
)
KEYS, POSITIONS = st.integers(-(2**63), 2**63 - 1), st.integers(0, 10**6)
SHARES = st.sampled_from([0.01, 0.1, 0.5, 0.9, 0.95, 0.999]) | st.floats(1e-6, 1.0)
PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.0, 2.5]) | st.floats(1e-3, 100),
        "top_k": st.sampled_from([0, 0, 1, 2, 5, 50, 10**30]) | st.integers(0, 5000),
        "top_p": st.just(1.0) | SHARES,
        "min_p": st.just(0.0) | st.floats(0.0, 0.999) | st.sampled_from([0.05, 0.2]),
    }
)


SHAPES = st.fixed_dictionaries(
    {
        "vocab": st.integers(1, 40) | st.sampled_from([127, 128, 129, 1000, 4099]),
        "scale": st.sampled_from([0.0, 1e-6, 0.3, 1.0, 3.0, 10.0, 1e4, 1e30]),
        "decimals": st.sampled_from([-1, 0, 1, 2]),
        "holes": st.sampled_from([0.0, 0.0, 0.5, 0.99]),
        "seed": st.integers(0, 2**31),
        "dtype": st.sampled_from([torch.float32, torch.bfloat16]),
    }
)


def make_logits(rows: int, shape: Mapping[str, Any]) -> Tensor:
    """Rows with ties, with entries of -inf, and of any size."""
    generator = torch.Generator().manual_seed(shape["seed"])
    made = shape["scale"] * torch.randn(rows, shape["vocab"], generator=generator)
    if shape["decimals"] >= 0:
        made = made.round(decimals=shape["decimals"])
    hidden = torch.rand(made.shape, generator=generator) < shape["holes"]
    hidden[:, shape["seed"] % shape["vocab"]] = False
    return made.masked_fill(hidden, -math.inf).to(shape["dtype"])


def by_definition(
    logits: Tensor, keys: Sequence[int], positions: Sequence[int], params: Sequence[SamplingParams]
) -> Drawn:
    noise = gumbel_noise(torch.tensor(keys), torch.tensor(positions), logits.shape[1])
    return draw_rows(logits, noise, params)


@settings(max_examples=120, deadline=None)
@given(SHAPES, st.lists(st.tuples(KEYS, POSITIONS, PARAMS), min_size=1, max_size=4))
def test_the_native_pass_draws_the_token_of_the_definition(shape, rows):
    logits = make_logits(len(rows), shape)
    keys, positions, chosen = zip(*rows, strict=True)
    params = [SamplingParams(**each) for each in chosen]
    native_draws = select_draws(logits.dtype)
    drawn = native_draws.draw_rows(logits, keys, positions, params)
    expected = by_definition(logits, keys, positions, params)
    assert drawn.tokens.equal(expected.tokens)
    # An entry on the edge of a truncation has at most 0.002 of the probability that is kept.
    cut = torch.tensor([each.top_p < 1.0 or each.min_p > 0.0 for each in params])
    gaps = (drawn.logprobs - expected.logprobs).abs()
    assert bool((gaps <= torch.where(cut, 3e-3, 2e-5)).all()), gaps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_alone_and_among_others_on_any_number_of_threads(dtype):
    some = 3.0 * torch.randn(9, 3001, generator=torch.Generator().manual_seed(0))
    params = [
        SamplingParams(),
        SamplingParams(temperature=0.7, top_p=0.9),
        SamplingParams(top_k=50, min_p=0.01),
    ] * 3
    keys, positions = [noise_key(0, row) for row in range(9)], [31 * row for row in range(9)]
    draws, before = select_draws(dtype), torch.get_num_threads()
    # A row of a wider tensor begins anywhere in memory.
    wide = torch.zeros(9, 3020, dtype=dtype)
    rows = wide[:, 7:3008]
    rows.copy_(some)
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            together = draws.draw_rows(rows, keys, positions, params)
            for row in range(9):
                one = slice(row, row + 1)
                alone = draws.draw_rows(rows[one].clone(), keys[one], positions[one], params[one])
                assert alone.tokens.equal(together.tokens[one])
                assert alone.logprobs.equal(together.logprobs[one])
    finally:
        torch.set_num_threads(before)


def test_few_rows_of_an_ordinary_model_are_left_to_the_definition():
    """The definition is slow: a row is left to it only if two scores are within rounding."""
    function, left = native.functions(torch.bfloat16)["draw_rows"], []

    def watched(*arguments: Any) -> None:
        function(*arguments)
        left.append(int((arguments[8] < 0).sum()))

    rows = (2.5 * torch.randn(64, 8000, generator=torch.Generator().manual_seed(0))).bfloat16()
    draws = NativeDraws(watched)
    for number, params in enumerate(({}, {"top_k": 50}, {"top_p": 0.95}, {"min_p": 0.05})):
        draws.draw_rows(rows, range(64), [number] * 64, [SamplingParams(**params)] * 64)
    assert sum(left) <= 2


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_give_no_logprob(wrong, temperature):
    broken = torch.zeros(2, 300)
    broken[1, 200] = wrong
    params = [SamplingParams(temperature=temperature)] * 2
    drawn = select_draws(torch.float32).draw_rows(broken, [1, 2], [3, 4], params)
    assert math.isfinite(float(drawn.logprobs[0]))
    assert math.isnan(float(drawn.logprobs[1]))


@settings(max_examples=20)
@given(KEYS, POSITIONS)
def test_noise_of_single_entries_is_the_noise(key, position):
    """Also of uniforms near 1, which float32 rounds so that a step of u is a large step of g."""
    numbers = torch.tensor([key]), torch.tensor([position])
    noise = gumbel_noise(*numbers, 151_936)[0]
    entries = torch.cat((torch.tensor([0, 1, 7, 49_151, 151_935]), noise.topk(20).indices))
    expected = noise[entries]
    assert gumbel_noise(*numbers, 151_936, entries)[0].equal(expected)
    single = entry_noise(key, position)
    found = [single(entry) for entry in entries.tolist()]
    assert found == pytest.approx(expected.tolist(), rel=1e-6, abs=4e-6)
