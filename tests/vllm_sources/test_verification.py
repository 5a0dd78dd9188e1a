"""vLLM's own samplers, its kernels interpreted: texts with drafts equal plain decoding.

LONGTAIL_VLLM_SOURCES names an unpacked release. The whole Model Runner V2 of vLLM 0.32 runs in
`tests/vllm_wheel`.
"""

import os
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import Tensor

from longtail.vllm import coupled_v2
from vllm_sources.loader import GPU, load
from vllm_sources.machine import Machine, Requests, rows

SOURCES = Path(os.environ["LONGTAIL_VLLM_SOURCES"])
COUNT, VOCAB, STEPS = 10_000, 24, 2
pytestmark = [  # of what vLLM imports, and of interpreted logarithms of 0
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
pytest.importorskip("triton", reason="its interpreter runs the kernels, and it is not installed")
load(SOURCES)


@pytest.fixture(autouse=True, scope="module")
def plugin() -> Iterator[None]:
    """vLLM with the functions of the plugin."""
    for name in ("sample.gumbel", "spec_decode.rejection_sampler"):
        assert Path(import_module(f"{GPU}.{name}").__file__).is_relative_to(SOURCES)
    with pytest.MonkeyPatch.context() as patch:
        for each in coupled_v2.patches():
            patch.setattr(each.owner, each.name, each.replacement)
        yield


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


def before(drawn: Tensor) -> Tensor:
    """Return the draw of the row before each, which is the draft that stands."""
    return drawn[(torch.arange(len(drawn)) - 1).clamp(min=0)]


def test_texts_equal_plain_decoding_whatever_is_drafted() -> None:
    """A fifth of the requests each has right, wrong, random, mixed and coupled drafts."""
    generator = torch.Generator().manual_seed(11)
    given = requests(COUNT, 1)
    drafts = torch.randint(0, STEPS + 1, (COUNT,), generator=generator)
    at = rows(drafts, torch.randint(5, 5000, (COUNT,), generator=generator))
    logits = random_logits(len(at), 2)
    machine = Machine(given, VOCAB, STEPS)
    drawn = machine.plain(logits.clone(), at).sampled_token_ids[:, 0]
    right, kind = before(drawn), at.owner % 5
    chance = torch.randint(0, VOCAB, drawn.shape, generator=generator)
    coupled, some = torch.zeros_like(drawn), kind == 4
    close = logits + random_logits(len(at), 3) / 2
    coupled[some] = machine.draft(close[some], at.owner[some], at.position[some])
    wrong = (right + 1 + chance % (VOCAB - 1)) % VOCAB
    mixed = torch.where(chance % 3 > 0, right, chance)
    drafted = torch.stack([right, wrong, chance, mixed, before(coupled)])
    fed = torch.where(at.place == 0, 3, drafted[kind, torch.arange(len(at))])

    done = machine.verify(logits.clone(), at, fed)
    first, column = at.starts[:-1, None], torch.arange(STEPS + 1)
    inside = column < done.num_sampled[:, None]
    plain = drawn[(first + column).clamp(max=len(drawn) - 1)]
    assert torch.equal(done.sampled_token_ids[inside], plain[inside])
    # As many tokens stand as drafts agree with plain decoding, and one more.
    agree = ((fed == right) & (at.place > 0))[(first + 1 + column[:-1]).clamp(max=len(fed) - 1)]
    agree &= column[:-1] < drafts[:, None]
    assert torch.equal(done.num_sampled.long(), agree.int().cumprod(1).sum(1) + 1)
    means = [float(done.num_sampled[which::5].float().mean()) for which in range(5)]
    assert means[:2] == [pytest.approx(float(drafts[::5].float().mean()) + 1), 1]
    assert means[2] < 1.2 < means[3] < 1.8
    assert 1.3 < means[4] < 2
    # Where the target truncates nothing, a drafter that equals it drafts its very draws.
    whole = ((given.top_k == VOCAB) & (given.top_p == 1))[at.owner].nonzero()[:1000, 0]
    own = machine.draft(logits[whole], at.owner[whole], at.position[whole])
    assert torch.equal(own, drawn[whole])
