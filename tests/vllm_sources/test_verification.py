"""vLLM's own samplers, its kernels interpreted: texts with drafts equal plain decoding.

LONGTAIL_VLLM_SOURCES names an unpacked release, LONGTAIL_VLLM_REQUESTS the number of requests in
each case (10,000 if unset).
"""

import os
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import Tensor

import support.interpreted  # noqa: F401  (Triton's interpreter, or a skip)
from longtail.integrations.vllm import guards, v2
from longtail.integrations.vllm.settings import VllmSettings
from vllm_sources.loader import GPU, load
from vllm_sources.machine import Machine, Requests, Rows, rows

REQUESTS = int(os.environ.get("LONGTAIL_VLLM_REQUESTS", "10000"))
VOCAB, STEPS = 24, 2
load(Path(os.environ["LONGTAIL_VLLM_SOURCES"]))


@pytest.fixture(autouse=True, scope="module")
def coupled() -> Iterator[None]:
    """vLLM with the functions of the plugin."""
    restore = guards.replace(v2.patches(VllmSettings(), None))
    yield
    restore()


def requests(count: int, seed: int, *, truncated: bool) -> Requests:
    """Return requests of several temperatures, 0 among them, and of every truncation."""
    generator = torch.Generator().manual_seed(seed)

    def one_of(*values: float) -> Tensor:
        return torch.tensor(values)[torch.randint(len(values), (count,), generator=generator)]

    whole = torch.full((count,), VOCAB)
    return Requests(
        temperature=one_of(0.0, 0.6, 1.0, 1.4),
        top_k=one_of(VOCAB, 1, 5, 12).int() if truncated else whole.int(),
        top_p=one_of(1.0, 0.3, 0.8, 0.95) if truncated else torch.ones(count),
        seed=torch.randint(-(2**62), 2**62, (count,), generator=generator),
    )


def random_logits(count: int, seed: int) -> Tensor:
    return torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def fed_tokens(at: Rows, drafts: Tensor) -> Tensor:
    """Return the token fed at each row: the text's last one, then the drafts."""
    return torch.where(at.place == 0, torch.tensor(3), drafts)


def shifted(at: Rows, drawn: Tensor) -> Tensor:
    """Return the draw of the row before, which is the draft that stands."""
    before = drawn[(torch.arange(len(at)) - 1).clamp(min=0)]
    return torch.where(at.place == 0, torch.tensor(3), before)


class Case:
    """Requests, their rows, the target's logits and what plain decoding draws at each row."""

    def __init__(self, count: int, *, truncated: bool, ragged: bool) -> None:
        generator = torch.Generator().manual_seed(11)
        self.requests = requests(count, 1, truncated=truncated)
        drafts = torch.full((count,), STEPS)
        if ragged:
            drafts = torch.randint(0, STEPS + 1, (count,), generator=generator)
        self.at = rows(drafts, torch.randint(5, 5000, (count,), generator=generator))
        self.logits = random_logits(len(self.at), 2)
        self.machine = Machine(self.requests, VOCAB, STEPS, logprobs="processed_logprobs")
        self.drawn = self.machine.plain(self.logits.clone(), self.at).sampled_token_ids[:, 0]
        self.random = torch.randint(0, VOCAB, self.drawn.shape, generator=generator)

    def drafts(self, kind: str) -> Tensor:
        right = shifted(self.at, self.drawn)
        if kind == "right":
            return right
        if kind == "wrong":
            return (right + 1 + self.random % (VOCAB - 1)) % VOCAB
        if kind == "mixed":  # a draft stands with probability two thirds
            return torch.where(self.random % 3 > 0, right, self.random)
        assert kind == "coupled"
        close = self.logits + random_logits(len(self.at), 3) / 2
        with_draft = torch.cat([self.at.place[1:] > 0, torch.tensor([False])])
        drawn = torch.zeros_like(self.drawn)
        drawn[with_draft] = self.machine.draft(
            close[with_draft], self.at.owner[with_draft], self.at.position[with_draft]
        )
        return shifted(self.at, drawn)

    def check(self, kind: str) -> float:
        """Compare each text with plain decoding; return the mean number of tokens a step."""
        fed = fed_tokens(self.at, self.drafts(kind))
        done = self.machine.verify(self.logits.clone(), self.at, fed)
        starts, counts = self.at.starts, self.at.starts.diff()
        column = torch.arange(STEPS + 1)
        inside = column < done.num_sampled[:, None]
        plain = self.drawn[(starts[:-1, None] + column).clamp(max=len(self.drawn) - 1)]
        assert torch.equal(done.sampled_token_ids[inside], plain[inside])
        # As many tokens stand as drafts agree with plain decoding, and one more.
        agree = (fed == shifted(self.at, self.drawn)) & (self.at.place > 0)
        padded = agree[(starts[:-1, None] + 1 + column[:-1]).clamp(max=len(agree) - 1)]
        padded &= column[:-1] < (counts - 1)[:, None]
        assert torch.equal(done.num_sampled.long(), padded.int().cumprod(1).sum(1) + 1)
        return float(done.num_sampled.float().mean())


@pytest.fixture(scope="module", params=["whole", "truncated"])
def full(request) -> Case:
    return Case(REQUESTS, truncated=request.param == "truncated", ragged=False)


@pytest.fixture(scope="module", params=["whole", "truncated"])
def ragged(request) -> Case:
    return Case(REQUESTS, truncated=request.param == "truncated", ragged=True)


def test_texts_equal_plain_decoding_when_all_drafts_are_right(full):
    assert full.check("right") == STEPS + 1


def test_texts_equal_plain_decoding_when_all_drafts_are_wrong(full):
    assert full.check("wrong") == 1


def test_texts_equal_plain_decoding_with_mixed_drafts(full):
    assert 1.5 < full.check("mixed") < 2.5


def test_texts_equal_plain_decoding_with_coupled_drafts(full):
    assert full.check("coupled") > 1.5


def test_texts_equal_plain_decoding_with_ragged_drafts(ragged):
    assert ragged.check("mixed") < 2.5
    assert ragged.check("coupled") > 1.2


def test_drafts_draw_with_the_targets_noise(full):
    if full.requests.top_p.min() < 1:
        pytest.skip("a drafter truncates nothing, so its draws may be ones that the target cuts")
    some = slice(0, 3000)
    drawn = full.machine.draft(full.logits[some], full.at.owner[some], full.at.position[some])
    assert torch.equal(drawn, full.drawn[some])


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_logprobs_are_those_of_plain_decoding(mode):
    count = 300
    given = requests(count, 4, truncated=True)
    at = rows(torch.full((count,), STEPS), torch.arange(count) * 7)
    logits = random_logits(len(at), 5)
    machine = Machine(given, VOCAB, STEPS, logprobs=mode)
    plain = machine.plain(logits.clone(), at)
    drawn = plain.sampled_token_ids[:, 0]
    fed = fed_tokens(at, shifted(at, drawn))
    done = machine.verify(logits.clone(), at, fed)
    assert torch.equal(done.sampled_token_ids.reshape(-1), drawn)
    assert torch.equal(done.logprobs_tensors.logprobs, plain.logprobs_tensors.logprobs)
    if mode == "raw_logprobs":
        expected = logits.log_softmax(-1).gather(1, drawn[:, None])
        torch.testing.assert_close(done.logprobs_tensors.logprobs[:, :1], expected)
    else:
        assert (done.logprobs_tensors.logprobs <= 0).all()


def test_the_drawn_distribution_is_the_targets_chi_square():
    # Chosen by chance, coupled to the target by another distribution, and never accepted: the
    # token of a request must be distributed as the target's probabilities say, in each case.
    count = REQUESTS
    generator = torch.Generator().manual_seed(21)
    logits = torch.randn(1, VOCAB, generator=generator).expand(count * 2, VOCAB).contiguous()
    given = Requests(
        temperature=torch.full((count,), 0.8),
        top_k=torch.full((count,), VOCAB, dtype=torch.int32),
        top_p=torch.ones(count),
        seed=torch.randint(-(2**62), 2**62, (count,), generator=generator),
    )
    at = rows(torch.ones(count, dtype=torch.int64), torch.full((count,), 77))
    machine = Machine(given, VOCAB, 1)
    other = torch.randn(1, VOCAB, generator=generator).expand(count, VOCAB).contiguous()
    first = at.place == 0
    drafts = torch.zeros(len(at), dtype=torch.int64)
    drafts[~first] = machine.draft(other, at.owner[first], at.position[first])
    done = machine.verify(logits.clone(), at, fed_tokens(at, drafts))
    probs = (logits[0] / 0.8).softmax(0)
    sampled, both = done.sampled_token_ids, done.num_sampled == 2
    assert 0.02 < float(both.float().mean()) < 0.98
    for tokens in (sampled[:, 0], sampled[both, 1]):
        expected = probs * len(tokens)
        large = expected >= 5
        seen = torch.bincount(tokens, minlength=VOCAB).float()
        seen = torch.cat([seen[large], seen[~large].sum()[None]])
        expected = torch.cat([expected[large], expected[~large].sum()[None] + 1e-9])
        statistic = float(((seen - expected) ** 2 / expected).sum())
        freedom = int(large.sum())
        assert statistic < freedom + 5 * (2 * freedom) ** 0.5, (statistic, freedom)


def test_whole_texts_equal_plain_decoding_over_many_steps():
    # A bigram model: the logits of a row are those of the token fed there.
    count, length = 60, 14
    target, drafter = random_logits(VOCAB, 6), random_logits(VOCAB, 6) + random_logits(VOCAB, 7)
    given = requests(count, 8, truncated=True)
    machine = Machine(given, VOCAB, STEPS)
    owners, generator = torch.arange(count), torch.Generator().manual_seed(9)

    plain = torch.full((count, length + 1), 3)
    for step in range(length):
        at = rows(torch.zeros(count, dtype=torch.int64), torch.full((count,), 40 + step))
        logits = target[plain[:, step]]
        plain[:, step + 1] = machine.plain(logits, at).sampled_token_ids[:, 0]

    texts = [[3] for _ in range(count)]
    steps = 0
    while min(len(text) for text in texts) <= length:
        ends = torch.tensor([len(text) - 1 for text in texts])
        chain = [torch.tensor([text[-1] for text in texts])]
        for ahead in range(STEPS):
            chain.append(machine.draft(drafter[chain[-1]], owners, 40 + ends + ahead))
        drafts = torch.randint(0, STEPS + 1, (count,), generator=generator)
        at = rows(drafts, 40 + ends)
        fed = torch.stack(chain, 1)[at.owner, at.place]
        done = machine.verify(target[fed], at, fed)
        for text, tokens, stand in zip(
            texts, done.sampled_token_ids.tolist(), done.num_sampled.tolist(), strict=True
        ):
            text.extend(tokens[:stand])
        steps += 1
    assert [text[: length + 1] for text in texts] == plain.tolist()
    assert steps < length


def test_vllm_reports_more_tokens_a_step_than_its_default_drafts():
    # Coupled drafts against the most likely token, both verified by matching.
    count = 300
    given = Requests(
        temperature=torch.ones(count),
        top_k=torch.full((count,), VOCAB, dtype=torch.int32),
        top_p=torch.ones(count),
        seed=torch.arange(count) * 7919,
    )
    at = rows(torch.ones(count, dtype=torch.int64), torch.full((count,), 9))
    logits = random_logits(len(at), 12) / 2
    close = logits + random_logits(len(at), 13) / 4
    machine = Machine(given, VOCAB, 1)
    first = at.place == 0
    tokens = {}
    for name in ("coupled", "greedy"):
        drafts = torch.zeros(len(at), dtype=torch.int64)
        drafts[~first] = (
            machine.draft(close[first], at.owner[first], at.position[first])
            if name == "coupled"
            else close[first].argmax(-1)
        )
        done = machine.verify(logits.clone(), at, fed_tokens(at, drafts))
        tokens[name] = float(done.num_sampled.float().mean())
    assert tokens["coupled"] > tokens["greedy"] + 0.2, tokens


def test_real_modules_were_loaded():
    for name in (f"{GPU}.sample.gumbel", f"{GPU}.spec_decode.rejection_sampler"):
        module = import_module(name)
        assert module is sys.modules[name]
        assert Path(module.__file__).is_relative_to(os.environ["LONGTAIL_VLLM_SOURCES"])
