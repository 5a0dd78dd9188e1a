"""Draws and noise in Triton against the reference in `sampling`."""

import pytest
import torch
from torch import Tensor

from longtail.model.kernels.draws import TorchDraws
from longtail.model.kernels.triton_draws import TritonDraws
from longtail.sampling import draw, gumbel_noise
from longtail.types import SamplingParams
from support.interpreted import DEVICE

DRAWS = TritonDraws()
KEYS = torch.tensor([0, -1, 2**63 - 1, -(2**63), 123456789, 5, 5])
POSITIONS = torch.tensor([0, 7, 1, 2**31, 40_000, 3, 4])


def on_device(*tensors: Tensor) -> list[Tensor]:
    return [each.to(DEVICE) for each in tensors]


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [1, 1024, 9011])
def test_noise_equals_the_reference_within_a_few_units_in_the_last_place(vocab):
    found = DRAWS.noise(*on_device(KEYS, POSITIONS), vocab).cpu()
    expected = gumbel_noise(KEYS, POSITIONS, vocab)
    assert found.shape == expected.shape
    error = (found.double() - expected.double()).abs()
    assert bool((error <= torch.maximum(torch.tensor(2e-6), 4e-7 * expected.abs())).all())
    # The hash is the same to the bit: noise that differs in it is another number altogether.
    assert float((found - found.flip(0)).abs().mean()) > 0.5


def logits(vocab: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return (3 * torch.randn(len(KEYS), vocab, generator=generator)).to(dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", [5, 8192, 9011])
@pytest.mark.parametrize("draws", [DRAWS, TorchDraws()], ids=["triton", "torch"])
def test_draws_equal_the_reference(draws, vocab, dtype):
    """Each row has its own temperature, some are greedy; the noise is the reference's."""
    scores, noise = logits(vocab, dtype), gumbel_noise(KEYS, POSITIONS, vocab)
    temperatures = torch.tensor([1.0, 0.6, 0.0, 1.0, 2.5, 0.0, 1.0])
    drawn = draws.draw(*on_device(scores, KEYS, POSITIONS, temperatures))
    for row, temperature in enumerate(temperatures.tolist()):
        params = SamplingParams(temperature=temperature)
        expected = draw(scores[row : row + 1], noise[row : row + 1], params)
        assert drawn.tokens[row] == expected.tokens[0]
        assert float(drawn.logprobs[row]) == pytest.approx(float(expected.logprobs[0]), abs=1e-5)
        assert temperature or float(drawn.logprobs[row]) == 0.0


def test_of_equal_scores_the_first_entry_wins_also_between_chunks():
    scores = torch.zeros(2, 20_000)
    scores[0, [17_000, 9_000, 19_999]] = 4.0
    scores[1, [1030, 6]] = 4.0
    zeros = torch.zeros(2)
    drawn = DRAWS.draw(*on_device(scores, KEYS[:2], POSITIONS[:2], zeros))
    assert drawn.tokens.tolist() == [9_000, 6]


def test_rows_may_be_part_of_a_wider_tensor_and_logits_minus_infinity():
    wide = torch.full((7, 3000), torch.nan)
    wide[:, :2500] = logits(2500)
    wide[:, 1:1200] = -torch.inf
    temperatures = torch.ones(7)
    arguments = on_device(KEYS, POSITIONS, temperatures)
    found = DRAWS.draw(wide.to(DEVICE)[:, :2500], *arguments)
    expected = TorchDraws().draw(wide[:, :2500], KEYS, POSITIONS, temperatures)
    assert found.tokens.tolist() == expected.tokens.tolist()
    torch.testing.assert_close(found.logprobs.cpu(), expected.logprobs, rtol=0.0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")  # NumPy's, of numbers that are none
def test_nan_logits_give_a_nan_logprob(bad, temperature):
    scores = logits(9000)
    scores[1, 8500] = bad
    temperatures = torch.full((7,), temperature)
    drawn = DRAWS.draw(*on_device(scores, KEYS, POSITIONS, temperatures))
    assert not drawn.logprobs[1].isfinite()
    assert drawn.logprobs[[0, *range(2, 7)]].isfinite().all()
    assert bool((drawn.tokens < 9000).all())
