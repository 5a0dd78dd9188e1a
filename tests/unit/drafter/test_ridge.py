"""The ridge drafter: its weights are those of the regressions, its drafts those of its weights."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from longtail.drafter.eagle.drafter import EagleDrafter
from longtail.drafter.formats.checkpoint import (
    LoadedDrafter,
    TrainingRecord,
    identity,
    load_drafter,
)
from longtail.drafter.formats.eagle_export import export_drafter
from longtail.drafter.formats.eagle_import import load_published
from longtail.drafter.ridge.drafter import RidgeDrafter
from longtail.drafter.ridge.layer import RidgeConfig, RidgeLayer
from longtail.drafter.ridge.sums import RIDGE, SequenceSums
from longtail.drafter.ridge.trainer import RidgeTrainer
from longtail.drafter.weights import copy_parameters
from longtail.errors import CheckpointError, ConfigError, DataError
from longtail.model.hf.tokenizer import Tokenizer
from longtail.model.transformer import Transformer
from longtail.rl.data.examples import Example
from longtail.rl.packing import pack_sequences
from longtail.sampling import gumbel_noise
from longtail.speculation.drafter import Draftable, Observed
from longtail.speculation.strategy import Strategy
from longtail.types import PackedSequences
from support.eagle_requests import KEY, keyed_noise, ridge_layer, text
from support.engine_requests import draftable, features_of, observed
from support.spot_training import same
from support.tiny_models import tiny_model, tiny_tokenizer

SLOTS = 4


def _config(model: Transformer) -> RidgeConfig:
    return RidgeConfig(target=model.config, slots=SLOTS)


def _texts(model: Transformer, lengths: Sequence[int]) -> dict[str, tuple[list[int], Tensor]]:
    """Return a text of each length with states as a target may have them."""
    generator, found = torch.Generator().manual_seed(1), {}
    for number, length in enumerate(lengths):
        tokens = text(length, seed=number)
        drawn = torch.randn(length, 32, generator=generator) * torch.arange(1, 33) / 16
        states = drawn.to(model.dtype) + model.embedding(torch.tensor(tokens)).detach()
        found[str(number)] = tokens, states
    return found


def _batch(seed: int, count: int = 6) -> list[PackedSequences]:
    drawn = (text(20, seed=100 * seed + each) for each in range(count))
    return pack_sequences([Example(tokens=tuple(each), prompt_len=3) for each in drawn], 50)


def _layer(model: Transformer, seed: int = 2) -> RidgeLayer:
    return ridge_layer(_config(model), seed).to(model.dtype)


def _regression(gram: Tensor, moment: Tensor, num_rows: int) -> Tensor:
    """Least squares plus RIDGE times each weight's square, for inputs of a mean square of 1."""
    mean_square = gram.diagonal() / num_rows
    scale = mean_square.clamp_min(torch.finfo(torch.float32).tiny).rsqrt()[:, None]
    scaled = gram * scale * scale.T
    scaled.diagonal().add_(RIDGE)
    return torch.linalg.solve(scaled, moment * scale) * scale


def test_each_slot_is_one_ridge_regression():
    """`solve` eliminates a slot's own input; the reference regresses on all inputs at once."""
    model = tiny_model(dtype=torch.float64)
    read, signal = SequenceSums(model, SLOTS), []
    for name, (tokens, states) in _texts(model, (203, 400, 5)).items():
        read.observe([_seen(name, tokens, 0, len(tokens))], states)
        joined = torch.cat((states, model.embedding(torch.tensor(tokens)).detach()), 1)
        signal += [joined.new_zeros(SLOTS, 64), joined[3:-1]]
    sums = read.take()
    assert sums.num_tokens == 203 + 400 + 5 - 3 * 4
    signal = torch.cat([*signal, signal[0]])
    signal = (signal / sums.steps).round() * sums.steps
    solved = sums.solve(range(SLOTS))
    for slot in range(1, SLOTS + 1):
        later = signal[slot:]
        inputs = [signal[:-slot, :32], signal[1 : len(signal) - slot + 1, 32:], later[:, 32:]]
        rows = torch.cat(inputs[: 2 + (slot > 1)], 1)
        expected = _regression(rows.T @ rows, rows.T @ later[:, :32], int(sums.num_tokens))
        found = [solved[f"streams.{slot - 1}.weight"].T]
        if slot > 1:
            found.append(solved[f"transitions.{slot - 2}.weight"].T)
        torch.testing.assert_close(torch.cat(found), expected.float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("seed", "chunk"), [(0, 40), (1, 7), (2, 1000)])
def test_law_sums_do_not_depend_on_who_adds_which_part_when(seed, chunk, monkeypatch):
    """To the bit: any order, cuts, interleaving and repetition, several sums, threads, chunks."""
    model = tiny_model()
    texts = _texts(model, (40, 3, 4, 71, 17))
    expected = SequenceSums(model, SLOTS)
    for name, (tokens, states) in texts.items():
        expected.observe([_seen(name, tokens, 0, len(tokens))], states)
    choose = random.Random(seed)
    monkeypatch.setattr("longtail.drafter.ridge.sums._CHUNK", chunk)
    workers = [SequenceSums(model, SLOTS) for _ in range(2)]
    owners, ends = {name: choose.choice(workers) for name in texts}, dict.fromkeys(texts, 0)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1 + seed % 2)
    while unfinished := [name for name in texts if ends[name] < len(texts[name][0])]:
        worker = choose.choice(workers)
        chosen = [name for name in unfinished if owners[name] is worker and choose.random() < 0.7]
        seen, features = [], [torch.empty(0, 32)]
        for name in choose.sample(chosen, len(chosen)):
            tokens, states = texts[name]
            start = max(ends[name] - choose.randrange(3), 0)  # a few again
            ends[name] = min(ends[name] + choose.randrange(1, 30), len(tokens))
            seen.append(_seen(name, tokens, start, ends[name]))
            features.append(states[start : ends[name]])
        worker.observe(seen, torch.cat(features))
    torch.set_num_threads(num_threads)
    one, other = (worker.take() for worker in workers)
    whole = expected.take()
    found, again = whole.faded(0.8), whole.faded(0.8)
    for part in (one, other):
        found.add(part)
    other.add(one)
    again.add(other)
    for name, tensor in whole.tensors().items():
        assert other.tensors()[name].equal(tensor), name
        assert found.tensors()[name].equal(again.tensors()[name]), f"{name}, earlier texts faded"


def test_a_text_is_added_whole_or_not_at_all():
    """Not with tokens missing, and not before its end: it may be continued elsewhere."""
    model = tiny_model()
    (tokens, states), *_ = _texts(model, (40,)).values()
    read = SequenceSums(model, SLOTS)
    read.observe([_seen("a", tokens, 4, 20)], states[4:20])
    read.observe([_seen("a", tokens, 20, 40)], states[20:])
    assert read.take().num_tokens == 0
    read.observe([_seen("a", tokens, 3, 20)], states[3:20])
    read.observe([_seen("a", tokens, 25, 40)], states[25:])
    assert read.take().num_tokens == 0
    moved = replace(_seen("a", tokens, 0, 20), is_finished=False)
    read.observe([moved], states[:20])
    assert read.take().num_tokens == 0
    read.observe([moved], states[:20])
    read.observe([_seen("a", tokens, 15, 40)], states[15:])
    read.observe([_seen("a", tokens, 0, 40)], states)
    assert read.take().num_tokens == 36


def test_training_reads_the_states_of_completions_and_restores():
    """Equals sums over each text alone; prompts are not learned."""
    model = tiny_model(dtype=torch.float64)
    trainer = RidgeTrainer(RidgeLayer(_config(model)).double(), model)
    batch, expected = _batch(0), SequenceSums(model, SLOTS)
    report = trainer.step(batch)
    for number, packed in enumerate(batch):
        for start, end in pairwise(packed.cu_seqlens):
            tokens = packed.tokens[start:end].tolist()
            seen = _seen(f"{number}/{start}", tokens, 0, len(tokens) - 1)
            expected.observe([seen], _states(model, tokens)[:-1])
    assert report.num_trained == 6 * 16
    assert same(trainer.tensors(), expected.take().tensors())
    again = RidgeTrainer(RidgeLayer(_config(model)).double(), model)
    again.restore(1, {name: each.clone() for name, each in trainer.tensors().items()})
    trainer.step(_batch(1))
    again.step(_batch(1))
    assert same(copy_parameters(trainer.layer), copy_parameters(again.layer))
    with pytest.raises(CheckpointError, match="products is missing or misshapen"):
        again.restore(1, {**trainer.tensors(), "products": torch.zeros(2, 2)})
    short = pack_sequences([Example(tokens=(1, 2, 3), prompt_len=3)], 50)
    with pytest.raises(DataError, match="give longer sequences"):
        trainer.step(short)


@torch.no_grad()
def _states(model: Transformer, tokens: Sequence[int]) -> Tensor:
    return features_of(model, tokens, _config(model).taps)


def _seen(name: str, tokens: Sequence[int], start: int, end: int) -> Observed:
    return observed(name, tokens, start, end, is_finished=True)


def _asked(names: Sequence[str], tokens: Sequence[int]) -> list[Draftable]:
    return [draftable(name, tokens, 3, temperature=0.7) for name in names]


@pytest.mark.parametrize("ids", [None, list(range(3, 120, 2))])
def test_a_draft_is_the_draws_of_its_states(ids):
    """Each node is argmax of its slot's logits plus the noise of its position."""
    model = tiny_model(dtype=torch.float64)
    chosen = None if ids is None else torch.tensor(ids)
    drafter = RidgeDrafter(_layer(model), model, draft_ids=chosen)
    layer, tokens = _layer(model), text(12)
    states = _states(model, tokens)
    drafter.observe(
        [_seen("a", tokens, 0, 7), _seen("b", tokens, 0, 11)], states[[*range(7), *range(11)]]
    )
    (tree,) = drafter.propose(
        _asked("b", tokens), Strategy(depth=9, size=9), keyed_noise([12], 128)
    )

    entries = torch.arange(128) if chosen is None else chosen
    head = model.head.weight[entries]
    inputs = torch.cat((states[10:11], model.embedding(torch.tensor([tokens[11]]))), 1)
    expected = []
    for slot in range(1, SLOTS + 1):
        before = model.embedding(torch.tensor([expected[-1] if expected else tokens[11]]))
        logits = layer(slot, inputs, before) @ head.T
        noise = gumbel_noise(torch.tensor([KEY]), torch.tensor([11 + slot]), 128, entries)
        expected.append(int(entries[(logits / 0.7 + noise).argmax()]))
    assert tree.tokens == tuple(expected)
    assert tree.parents == (0, 1, 2, 3)


def test_a_request_is_drafted_only_after_the_token_before_its_root():
    model = tiny_model(dtype=torch.float64)
    drafter, tokens = RidgeDrafter(_layer(model), model), text(12)
    states, strategy = _states(model, tokens), Strategy(depth=2, size=2)

    def ask(names: str, length: int) -> list[int]:
        requests = _asked(names, tokens[:length])
        noise = keyed_noise([length] * len(names), 128)
        return [tree.size for tree in drafter.propose(requests, strategy, noise)]

    drafter.observe([_seen("a", tokens, 0, 8)], states[:8])
    assert ask("ab", 9) == [2, 0]
    assert ask("a", 10) == [0]
    drafter.observe([_seen("a", tokens, 8, 9)], states[8:9])
    assert ask("a", 10) == [2]
    drafter.refresh()
    assert ask("a", 10) == [0]


@pytest.mark.parametrize("strategy", [Strategy(depth=4), Strategy(depth=3, width=2, size=7)])
def test_new_weights_and_another_vocabulary_are_taken_over_in_mid_text(strategy):
    """The next draft is that of a drafter that had both from the start."""
    model, tokens = tiny_model(dtype=torch.float64), text(12)
    drafter = RidgeDrafter(_layer(model, 3), model, draft_ids=torch.arange(0, 128, 4))
    renewed, ids = _layer(model), torch.arange(1, 128, 2)
    fresh = RidgeDrafter(_layer(model), model, draft_ids=ids)
    for each in (drafter, fresh):
        each.observe([_seen("a", tokens, 0, 11)], _states(model, tokens)[:11])
    (request,) = _asked(["a"], tokens)
    before = drafter.propose([request], strategy, None)
    with pytest.raises(CheckpointError, match=r"streams\.0\.weight"):
        drafter.load_weights({**copy_parameters(renewed, ids), "streams.0.weight": torch.zeros(2)})
    assert drafter.propose([request], strategy, None) == before
    drafter.load_weights(copy_parameters(renewed, ids))
    assert drafter.propose([request], strategy, None) == fresh.propose([request], strategy, None)


@pytest.fixture
def made() -> tuple[Transformer, Tokenizer, LoadedDrafter]:
    model, tokenizer = tiny_model(), tiny_tokenizer()
    loaded = LoadedDrafter(
        layer=_layer(model),
        draft_ids=None,
        trained_on=identity("toy", model, tokenizer),
        training=TrainingRecord(steps=1, tokens=9, unroll_steps=1),
        sums=SequenceSums(model, SLOTS).take().tensors(),
    )
    return model, tokenizer, loaded


def test_a_saved_drafter_is_read_again(tmp_path, made):
    model, tokenizer, saved = made
    saved.save(tmp_path / "d")
    loaded = load_drafter(tmp_path / "d", model, tokenizer, strict_weights=True)
    assert loaded.layer.config == saved.layer.config
    assert same(copy_parameters(loaded.layer), copy_parameters(saved.layer))
    assert loaded.sums.keys() == saved.sums.keys()
    description = tmp_path / "d" / "drafter.json"
    description.write_text(description.read_text().replace('"slots": 4', '"slots": 99'))
    with pytest.raises(ConfigError, match=r"malformed .*slots .*99"):
        load_drafter(tmp_path / "d", model, tokenizer, strict_weights=True)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("products", lambda t: t * torch.nan, "sums/products holds .* NaN"),
        ("products", lambda t: t + torch.eye(64)[None].roll(1, -1) * 1e15, "larger than those of"),
        ("products", lambda t: t[1:], r"sums/products is float64 of shape \[4, 64, 64\], wanted"),
        ("products", lambda t: t + _NOT_DEFINITE, "no weights follow from the sums"),
        ("steps", lambda t: t * 0, "a step or a count is not positive"),
        ("counts", lambda t: t - 2000, "a step or a count is not positive"),
    ],
)
def test_sums_that_no_text_has_are_refused(tmp_path, made, name, change, message):
    model, tokenizer, saved = made
    sums = {**saved.sums, "counts": saved.sums["counts"] + 1000}
    replace(saved, sums=sums | {name: change(sums[name])}).save(tmp_path / "d")
    with pytest.raises(ConfigError, match=rf"drafter\.safetensors: .*{message}"):
        load_drafter(tmp_path / "d", model, tokenizer, strict_weights=False)


_NOT_DEFINITE = 1e12 * (2 * torch.eye(64, dtype=torch.float64) - 1)
"""Each product is at most that of the sizes, and some mixture of inputs has a negative square."""


def test_an_export_drafts_like_the_first_slot(tmp_path, made):
    model, tokenizer, saved = made
    export_drafter(tmp_path / "out", saved, model, torch.float32)
    eagle = load_published(tmp_path / "out", "toy", model, tokenizer).eagle
    drafters, tokens = (RidgeDrafter(_layer(model), model), EagleDrafter(eagle, model)), text(12)
    (request,) = _asked(["a"], tokens)
    for drafter in drafters:
        drafter.observe([_seen("a", tokens, 0, 11)], _states(model, tokens)[:11])
    one, other = (each.propose([request], Strategy(depth=1), None)[0] for each in drafters)
    assert one.tokens == other.tokens
    assert one.margins == pytest.approx(other.margins, rel=1e-4)
