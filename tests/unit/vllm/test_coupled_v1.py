"""Functions for vLLM's V1 runner; tests/vllm_wheel/test_v1.py has the runner itself."""

from types import SimpleNamespace

import torch

from longtail.sampling import gumbel_noise
from longtail.vllm import cpu_fixes
from longtail.vllm.coupled_v1 import draw_drafts, request_key

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


def test_attributes_of_a_library_that_poses_as_an_object_are_none() -> None:
    """Numba's wrappers have a function in the place of their dictionary."""

    class Wrapper:
        __dict__ = len  # type: ignore[assignment]

    assert cpu_fixes._attributes(Wrapper()) == {}
    assert cpu_fixes._attributes(SimpleNamespace(kernel=1)) == {"kernel": 1}
