"""Matching and truncation on plain tensors; `vllm_sources` and `vllm_wheel` have vLLM's own."""

from itertools import pairwise

import torch

from longtail.vllm import coupled_v2
from longtail.vllm.coupled_v1 import match
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
