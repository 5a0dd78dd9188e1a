"""Sample and match on plain tensors: texts equal plain decoding, whatever is drafted."""

from itertools import pairwise
from types import SimpleNamespace

import torch

from longtail.config.vllm_plugin import VllmSettings
from longtail.vllm import v2
from longtail.vllm.v1 import match
from support.vllm_releases import draw, release

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


def installed(monkeypatch, **settings):
    """Return vLLM's modules with the plugin's functions."""
    modules = release(monkeypatch)
    for patch in v2.patches(VllmSettings(**settings)):
        monkeypatch.setattr(patch.owner, patch.name, patch.replacement)
    return modules


def test_verification_and_drafts_use_the_noise_of_plain_decoding(monkeypatch):
    modules = installed(monkeypatch)
    generator = torch.Generator().manual_seed(7)
    requests = 6
    logits = torch.randn(requests * (STEPS + 1), VOCAB, generator=generator)
    owners = torch.arange(requests).repeat_interleave(STEPS + 1)
    places = torch.arange(STEPS + 1).repeat(requests)
    positions = 40 + 9 * owners + places
    heat = torch.tensor([0.0, 1.0, 0.7, 1.0, 1.3, 0.0])
    seeds = torch.randint(0, 2**62, (requests,), generator=generator)
    plain = draw(logits, owners, heat, seeds, positions, False)

    owner = modules["speculator"].DraftModelSpeculator()
    owner.model = SimpleNamespace(compute_logits=lambda hidden: hidden)
    at_one = heat.clamp(max=0) + (heat > 0)  # the logits have their temperature already
    rows = places < STEPS
    drafts = owner.sample_draft(
        logits[rows], positions[rows], owners[rows], at_one, seeds, torch.tensor(0), None
    )
    assert torch.equal(drafts, plain[rows])  # the drafter knows the target: all drafts stand
    assert owner.predicted == len(drafts)  # vLLM's estimate of acceptance

    fed = torch.full((requests, STEPS + 1), 3)
    fed[:, 1:] = drafts.view(requests, STEPS)
    starts = torch.arange(requests + 1, dtype=torch.int32) * (STEPS + 1)
    for wrong in (0, 1):
        tokens, count = modules["rejection_sampler"].rejection_sample(
            logits, None, (fed + wrong).view(-1), starts, positions, torch.arange(requests),
            owners, places, heat, seeds, STEPS, None, use_fp64=False,
        )  # fmt: skip
        assert count.tolist() == [1 if wrong else STEPS + 1] * requests
        for each, n, whole in zip(tokens, count, plain.view(requests, -1), strict=True):
            assert torch.equal(each[:n], whole[:n])


def test_truncation_uses_one_kernel_at_any_number_of_rows(monkeypatch):
    modules = release(monkeypatch)
    seen = []

    def kernel(logits, k, p, mask_value=0.0, has_topp_only_rows=True):
        seen.append((len(logits), None if k is None else k.tolist(), p is not None))
        return logits

    monkeypatch.setattr(modules["topk_topp_triton"], "apply_top_k_top_p_triton", kernel)
    monkeypatch.setattr(modules["topk_topp_triton"], "_SPLIT_MAX_BATCH", 3, raising=False)
    for patch in v2.patches(VllmSettings()):
        monkeypatch.setattr(patch.owner, patch.name, patch.replacement)
    truncate = modules["states"].apply_top_k_top_p
    logits = torch.randn(2, VOCAB)
    half, two = torch.full((2,), 0.5), torch.full((2,), 2)
    assert truncate(logits, None, None) is logits
    assert torch.equal(truncate(logits, None, half, has_topp_only_rows=True), logits)
    assert torch.equal(truncate(logits, two, half), logits)
    assert torch.equal(truncate(logits, two, None), logits)
    assert seen == [(4, None, True), (4, [2, 2, VOCAB, VOCAB], True), (2, [2, 2], False)]


def test_plain_steps_draw_by_keyed_noise_too(monkeypatch):
    modules = installed(monkeypatch, drafts="match")
    assert modules["sampler"].flashinfer_sampler_supported() is False
