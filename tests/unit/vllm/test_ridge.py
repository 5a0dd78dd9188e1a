"""The block that vLLM learns: its sums are those of whole texts, its drafts those of the layer."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longtail.drafter.ridge.layer import RidgeConfig, RidgeLayer
from longtail.drafter.weights import DRAFT_IDS, load_parameters
from longtail.errors import ConfigError
from longtail.vllm.ridge import FIRST_SOLVE, Block, Parts
from support.tiny_models import tiny_config

HIDDEN, VOCAB, DEPTH = 8, 24, 3
_GENERATOR = torch.Generator().manual_seed(0)
EMBEDDING = torch.randn(VOCAB, HIDDEN, generator=_GENERATOR)
HEAD = torch.nn.Linear(HIDDEN, VOCAB)


def model(**changes: object) -> SimpleNamespace:
    """vLLM's model, as far as a block reads it."""
    processor = SimpleNamespace(scale=1.0, soft_cap=None, org_vocab_size=VOCAB)
    parts = {
        "lm_head": HEAD,
        "logits_processor": processor,
        "embed_input_ids": EMBEDDING.__getitem__,
        "load_weights": lambda weights: None,
        "modules": list,
        "parameters": HEAD.parameters,
    }
    return SimpleNamespace(**{**parts, **changes})


def parts(**changes: object) -> Parts:
    config = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.float32))
    return Parts.of(model(**changes), config)


def text(number: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and states of a text; a state is of its text and position alone."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(VOCAB, (length,), generator=generator)
    return tokens, torch.randn(length, HIDDEN, generator=generator)


def rows(number: int, last: int, accepted: int) -> tuple[torch.Tensor, ...]:
    """The rows of a step that accepted `accepted` rows, the last at position `last`."""
    tokens, states = text(number, 64)
    at = last - torch.arange(DEPTH + 1)
    counts = torch.arange(DEPTH + 1) < accepted
    at = at.clamp(min=0)
    return torch.tensor([number]), states[at][None], tokens[at][None], at[None], counts[None]


def observe(block: Block, *each: tuple[torch.Tensor, ...]) -> None:
    """Take a step."""
    first = torch.tensor(block.reserve(len(each)))
    block.keep(first, *map(torch.cat, zip(*each, strict=True)))
    block.learn()


def expected(lengths: dict[int, tuple[int, int]]) -> torch.Tensor:
    """Return the products of whole texts, whose rows are those from a first to an end."""
    total = torch.zeros(DEPTH + 1, 2 * HIDDEN, 2 * HIDDEN)
    for number, (first, end) in lengths.items():
        tokens, states = text(number, 64)
        signal = torch.cat((states, EMBEDDING[tokens]), 1)[first:end]
        for lag in range(min(DEPTH + 1, len(signal))):
            total[lag] += signal[: len(signal) - lag].T @ signal[lag:]
    return total


@settings(deadline=None)
@given(st.data())
def test_sums_are_those_of_whole_texts_however_steps_cut_and_mix_them(data: st.DataObject) -> None:
    """Steps of any batch, in any order of places, with rows read again after a preemption."""
    block = Block(parts(), DEPTH, 4)
    ends = {number: number for number in range(1, 4)}
    for _ in range(data.draw(st.integers(1, 8))):
        running = data.draw(st.permutations(sorted(ends)))[: data.draw(st.integers(1, 3))]
        step = []
        for number in running:
            accepted = data.draw(st.integers(1, DEPTH + 1))
            ends[number] += accepted
            step.append(rows(number, ends[number] - 1, accepted))
        if data.draw(st.booleans()):  # a preempted request computes a row again
            step.append(rows(running[0], ends[running[0]] - 1, 1))
        observe(block, *step)
    wanted = {number: (number, end) for number, end in ends.items()}
    assert torch.allclose(block.sums.products, expected(wanted), atol=1e-4)
    assert int(block.sums.num_tokens) == sum(end - number for number, end in ends.items())


def learned() -> Block:
    block = Block(parts(), DEPTH, 4)
    for number in range(1, 9):
        for last in range(DEPTH, 63, 2):
            observe(block, rows(number, last, 2))
    return block


def test_it_solves_when_the_tokens_have_doubled() -> None:
    block = Block(parts(), DEPTH, 4)
    for step in range(4 * FIRST_SOLVE):
        before = block.num_solved
        observe(block, rows(1 + step // 60, 3 + step % 60, 1))
        solved = block.num_solved > before
        assert solved == (step + 1 in (FIRST_SOLVE, 2 * FIRST_SOLVE, 4 * FIRST_SOLVE))


def test_drafts_are_those_of_a_ridge_layer_with_its_vocabulary() -> None:
    block = learned()
    block.solve()
    weights = block.tensors()
    ids = weights.pop(DRAFT_IDS)
    target = replace(tiny_config(), hidden_size=HIDDEN)
    layer = RidgeLayer(RidgeConfig(target=target, slots=DEPTH))
    load_parameters(layer, weights)
    states, roots = torch.randn(5, HIDDEN), torch.arange(5)
    found = block.propose(states, roots, DEPTH, lambda _, logits, ids: ids[logits.argmax(-1)])
    inputs = torch.cat((states, EMBEDDING[roots]), 1)
    before = roots
    for slot in range(DEPTH):
        state = layer(slot + 1, inputs, EMBEDDING[before])
        before = ids[(state @ HEAD.weight[ids].T + HEAD.bias[ids]).argmax(-1)]
        assert torch.equal(found[:, slot], before)


def test_soft_cap_and_scale_of_the_head_are_the_targets() -> None:
    processor = SimpleNamespace(scale=0.5, soft_cap=2.0, org_vocab_size=VOCAB)
    block, seen = Block(parts(logits_processor=processor), 1, 4), []
    zeros = torch.zeros(HIDDEN, 2 * HIDDEN)
    block.take({"streams.0.weight": zeros, DRAFT_IDS: torch.tensor([3, 7])})
    block.propose(
        torch.ones(1, HIDDEN), torch.tensor([0]), 1,
        lambda _, logits, ids: seen.append(logits) or ids[:1],
    )  # fmt: skip
    assert torch.allclose(seen[0][0], torch.tanh(HEAD.bias[[3, 7]] / 2.0))


def test_a_failed_solve_keeps_the_weights_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    block = learned()
    block.solve()
    before = block.tensors()
    block.sums.products[0].fill_(-1e9)
    block.solve()
    assert "keeps its weights" in caplog.text
    assert all(torch.equal(before[name], each) for name, each in block.tensors().items())


def test_a_new_policy_fades_the_sums_and_renews_the_head() -> None:
    block = learned()
    block.solve()
    before = block.sums.products.clone()
    with torch.no_grad():
        HEAD.weight.mul_(2.0)
    try:
        block.renew()
        assert torch.equal(block._head[0], HEAD.weight[block.tensors()[DRAFT_IDS]])
    finally:
        with torch.no_grad():
            HEAD.weight.mul_(0.5)
    assert torch.allclose(block.sums.products, before * 0.25)
    assert block.is_ready


def test_saved_sums_go_on_in_any_steps() -> None:
    block, other = learned(), Block(parts(), DEPTH, 4)
    steps = torch.full((2 * HIDDEN,), 0.5)
    saved = {"products": block.sums.products * 4, "steps": steps, "counts": block.sums.counts}
    other.resume(saved)
    assert torch.allclose(other.sums.products, block.sums.products)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"embed_input_ids": None}, "no embed_input_ids"),
        ({"lm_head": None}, "no head of its own"),
        ({"lm_head": SimpleNamespace(weight=torch.zeros(2, 2, dtype=torch.int8))}, "quantised"),
    ],
)
def test_a_model_without_the_parts_is_refused_by_name(changes: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parts(**changes)
