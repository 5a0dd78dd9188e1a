"""Functions for vLLM's V1 runner; tests/vllm_wheel/test_v1.py has the runner itself."""

from functools import partial
from types import SimpleNamespace

import torch

from longtail.sampling import gumbel_noise
from longtail.vllm import cpu_fixes
from longtail.vllm.v1 import draw_drafts, request_key

VOCAB = 13


def test_drafts_of_a_reduced_vocabulary_use_the_noise_of_their_target_tokens():
    keys, positions = torch.tensor([8]), torch.tensor([5])
    entries = torch.tensor([2, 3, 7, 11])
    logits = torch.zeros(1, 4)
    noise = gumbel_noise(keys, positions, VOCAB)[0, entries]
    drafts = draw_drafts(logits, torch.tensor([1.0]), keys, positions, entries)
    assert drafts.tolist() == [int(entries[noise.argmax()])]
    greedy = draw_drafts(logits + torch.eye(4)[2], torch.tensor([0.0]), keys, positions, entries)
    assert greedy.tolist() == [7]


def test_requests_without_a_seed_have_keys_of_their_own():
    key = request_key("0.0", "12-0a1b2c3d")
    assert key == request_key("0.0", "12-ffffffff") == request_key("0.0", "12")
    others = {request_key("0.0", "13"), request_key("0.1", "12"), request_key("0.0", "1")}
    assert len({key, *others}) == 4


def test_blocks_of_rows_compute_the_same_products_and_no_neighbour_matters():
    heights = []

    def product(x, weight, bias):
        heights.append(len(x))  # whole numbers: the order of sums does not matter
        return torch.nn.functional.linear(x, weight, bias) + len(x) - 8

    generator = torch.Generator().manual_seed(4)
    weight, x = (torch.randint(-9, 9, (n, 6), generator=generator).float() for n in (5, 19))
    blocks = partial(cpu_fixes.multiply, product, 8)
    whole = blocks(x, weight, None)
    assert set(heights) == {8}
    assert torch.equal(whole, x @ weight.T)
    for row in range(19):
        assert torch.equal(blocks(x[row : row + 1], weight, None)[0], whole[row])
    assert blocks(x[:6].view(2, 3, 6), weight, None).shape == (2, 3, 5)


def test_blocks_of_rows_stay_when_weights_are_loaded_anew():
    heights, layer = [], SimpleNamespace()

    def stock(layer, remove_weight):
        layer.cpu_linear = lambda x, weight, bias: heights.append(len(x)) or x

    for _ in range(2):
        cpu_fixes._dispatch(stock, layer, remove_weight=True, rows=8)
        layer.cpu_linear(torch.ones(3, 1), None, None)
    assert heights == [8, 8]


def test_attributes_of_a_library_that_poses_as_an_object_are_none() -> None:
    """Numba's wrappers have a function in the place of their dictionary."""

    class Wrapper:
        __dict__ = len  # type: ignore[assignment]

    assert cpu_fixes._attributes(Wrapper()) == {}
    assert cpu_fixes._attributes(SimpleNamespace(kernel=1)) == {"kernel": 1}
