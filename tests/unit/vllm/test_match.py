"""Draws, matching and truncation on plain tensors; `vllm_sources` and `vllm_wheel` have vLLM's."""

from itertools import pairwise
from types import SimpleNamespace

import torch

from longtail.sampling import gumbel_noise
from longtail.vllm import coupled_v2, cpu_fixes
from longtail.vllm.coupled_v1 import draw_drafts, match, request_key
from support.vllm_releases import release

VOCAB, STEPS = 11, 3


def by_hand(drawn, drafted, starts):
    """Return the tokens of each request, by a loop over its rows."""
    texts = []
    for start, end in pairwise(starts):
        text = [drawn[start]]
        for row in range(start + 1, end):
            if drafted[row] != text[-1]:
                break
            text.append(drawn[row])
        texts.append(text)
    return texts


def test_match_equals_a_loop_over_requests():
    generator = torch.Generator().manual_seed(5)
    for _ in range(50):
        rows = torch.randint(1, STEPS + 2, (20,), generator=generator)
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), rows.cumsum(0)]).to(torch.int32)
        drawn = torch.randint(0, 3, (int(starts[-1]),), generator=generator)
        drafted = torch.randint(-1, 3, drawn.shape, generator=generator).to(torch.int32)
        tokens, count = match(drawn, drafted.roll(-1), starts[:-1], starts.diff() - 1, STEPS)
        pairs = zip(tokens.tolist(), count.tolist(), strict=True)
        found = [each[: n + 1] for each, n in pairs]
        assert found == by_hand(drawn.tolist(), drafted.tolist(), starts.tolist())


def test_truncation_uses_one_kernel_at_any_number_of_rows(monkeypatch):
    """And no fused sampler draws a plain step by noise of its own."""
    modules = release(monkeypatch)
    seen = []

    def kernel(logits, k, p, mask_value=0.0, has_topp_only_rows=True):
        seen.append((len(logits), None if k is None else k.tolist(), p is not None))
        return logits

    monkeypatch.setattr(modules["topk_topp_triton"], "apply_top_k_top_p_triton", kernel)
    monkeypatch.setattr(modules["topk_topp_triton"], "_SPLIT_MAX_BATCH", 3, raising=False)
    for patch in coupled_v2.patches():
        monkeypatch.setattr(patch.owner, patch.name, patch.replacement)
    truncate = modules["states"].apply_top_k_top_p
    logits = torch.randn(2, VOCAB)
    half, two = torch.full((2,), 0.5), torch.full((2,), 2)
    assert truncate(logits, None, None) is logits
    assert torch.equal(truncate(logits, None, half, has_topp_only_rows=True), logits)
    assert torch.equal(truncate(logits, two, half), logits)
    assert torch.equal(truncate(logits, two, None), logits)
    assert seen == [(4, None, True), (4, [2, 2, VOCAB, VOCAB], True), (2, [2, 2], False)]
    assert modules["sampler"].flashinfer_sampler_supported() is False


def test_drafts_of_a_reduced_vocabulary_use_the_noise_of_their_target_tokens():
    keys, positions = torch.tensor([8]), torch.tensor([5])
    entries = torch.tensor([2, 3, 7, 11])
    logits = torch.zeros(1, 4)
    noise = gumbel_noise(keys, positions, 13)[0, entries]
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
