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
from longtail.vllm import v2
from longtail.vllm.guards import VllmSettings
from vllm_sources.loader import GPU, load
from vllm_sources.machine import Machine, Recall, Requests, Rows, rows

REQUESTS = int(os.environ.get("LONGTAIL_VLLM_REQUESTS", "10000"))
VOCAB, STEPS = 24, 2
pytestmark = [  # of what vLLM imports, and of interpreted logarithms of 0
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
load(Path(os.environ["LONGTAIL_VLLM_SOURCES"]))


RECALLED = (
    (f"{GPU}.sample.gumbel", "gumbel_sample"),
    ("vllm.v1.sample.ops.topk_topp_triton", "apply_top_k_top_p_triton"),
)
"""Kernels of verified steps: all kinds of drafts are verified with equal logits."""


@pytest.fixture(autouse=True, scope="module")
def recalls() -> Iterator[list[Recall]]:
    """vLLM with the functions of the plugin; its draws and truncations of verified steps."""
    found = [Recall(getattr(import_module(module), name)) for module, name in RECALLED]
    with pytest.MonkeyPatch.context() as patch:
        for (module, name), recall in zip(RECALLED, found, strict=True):
            patch.setattr(import_module(module), name, recall)
        for each in v2.patches(VllmSettings()):
            patch.setattr(each.owner, each.name, each.replacement)
        yield found


def requests(count: int, seed: int) -> Requests:
    """Return requests of several temperatures, 0 among them, and of every truncation."""
    generator = torch.Generator().manual_seed(seed)

    def one_of(*values: float) -> Tensor:
        return torch.tensor(values)[torch.randint(len(values), (count,), generator=generator)]

    return Requests(
        temperature=one_of(0.0, 0.6, 1.0, 1.4),
        top_k=one_of(VOCAB, VOCAB, 1, 5, 12).int(),
        top_p=one_of(1.0, 1.0, 0.3, 0.8, 0.95),
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

    def __init__(self, count: int, recalls: list[Recall]) -> None:
        generator = torch.Generator().manual_seed(11)
        self.requests = requests(count, 1)
        drafts = torch.randint(0, STEPS + 1, (count,), generator=generator)
        self.at = rows(drafts, torch.randint(5, 5000, (count,), generator=generator))
        self.logits = random_logits(len(self.at), 2)
        self.machine = Machine(self.requests, VOCAB, STEPS)
        self.drawn = self.machine.plain(self.logits.clone(), self.at).sampled_token_ids[:, 0]
        for recall in recalls:  # the first verified step computes its own draws
            recall.calls.clear()
        self.random = torch.randint(0, VOCAB, self.drawn.shape, generator=generator)

    def drafts(self, kind: str) -> Tensor:
        right = shifted(self.at, self.drawn)
        if kind == "right":
            return right
        if kind == "wrong":
            return (right + 1 + self.random % (VOCAB - 1)) % VOCAB
        if kind == "random":
            return self.random
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


@pytest.fixture(scope="module")
def case(recalls) -> Case:
    return Case(REQUESTS, recalls)


def test_texts_equal_plain_decoding_when_all_drafts_are_right(case):
    assert case.check("right") == pytest.approx(len(case.at) / REQUESTS)


def test_texts_equal_plain_decoding_when_all_drafts_are_wrong(case):
    assert case.check("wrong") == 1


def test_texts_equal_plain_decoding_with_mixed_drafts(case):
    assert 1.2 < case.check("mixed") < 1.8


def test_texts_equal_plain_decoding_with_random_drafts(case):
    assert case.check("random") < 1.2


def test_texts_equal_plain_decoding_with_coupled_drafts(case):
    assert 1.3 < case.check("coupled") < 2


def test_drafts_draw_with_the_targets_noise(case):
    # Where the target truncates nothing, a drafter that equals it drafts its very draws.
    whole = (case.requests.top_k == VOCAB) & (case.requests.top_p == 1)
    some = whole[case.at.owner].nonzero()[:1000, 0]
    drawn = case.machine.draft(case.logits[some], case.at.owner[some], case.at.position[some])
    assert torch.equal(drawn, case.drawn[some])


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_logprobs_are_those_of_plain_decoding(mode):
    count = 120
    given = requests(count, 4)
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
    count = max(REQUESTS, 600)  # fewer would leave too few in a bin
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
    count, length = 40, 9
    target, drafter = random_logits(VOCAB, 6), random_logits(VOCAB, 6) + random_logits(VOCAB, 7)
    given = requests(count, 8)
    machine = Machine(given, VOCAB, STEPS)
    owners, generator = torch.arange(count), torch.Generator().manual_seed(9)

    plain = torch.full((count, length + 1), 3)
    for step in range(length):
        at = rows(torch.zeros(count, dtype=torch.int64), torch.full((count,), 40 + step))
        logits = target[plain[:, step]]
        plain[:, step + 1] = machine.plain(logits, at).sampled_token_ids[:, 0]

    texts = [[3] for _ in range(count)]
    steps = stood = 0
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
        stood += int(done.num_sampled.sum())
    assert [text[: length + 1] for text in texts] == plain.tolist()
    assert stood > 1.2 * count * steps


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
