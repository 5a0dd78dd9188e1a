"""The ridge drafter: its weights are those of the regressions, its drafts those of its weights."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from longtail.drafter.eagle.fit import ridge
from longtail.drafter.formats.checkpoint import (
    TrainingRecord,
    identity,
    load_drafter,
    save_drafter,
)
from longtail.drafter.ridge.drafter import RidgeDrafter
from longtail.drafter.ridge.layer import RidgeConfig, RidgeLayer
from longtail.drafter.ridge.trainer import BlockRows, RidgeSums, RidgeTrainer, block_rows
from longtail.drafter.training.texts import pack_texts
from longtail.engine.engine import RolloutEngine
from longtail.engine.report import RolloutMeter
from longtail.engine.request import EngineLimits
from longtail.engine.speculation.speculator import Speculation
from longtail.errors import CheckpointError, ConfigError, DataError
from longtail.model.attention import PackedAttention
from longtail.model.transformer import Transformer
from longtail.rl.data.examples import Example
from longtail.sampling import gumbel_noise, noise_key
from longtail.speculation.drafter import Draftable, Observed
from longtail.speculation.strategy import Strategy
from longtail.types import Completion, PackedSequences, Request, SamplingParams
from support.eagle_requests import KEY, KeyedNoise, text
from support.tiny_models import tiny_model, tiny_tokenizer

SLOTS = 4


def _config(model: Transformer, draft_vocab_size: int = 0) -> RidgeConfig:
    return RidgeConfig(target=model.config, slots=SLOTS, draft_vocab_size=draft_vocab_size)


def _rows(seed: int, count: int = 600, hidden: int = 32) -> BlockRows:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    sizes = torch.arange(1, hidden + 1)
    features = draw(count, hidden) * sizes
    embeddings = draw(SLOTS, count, hidden) + 0.3
    wanted = features + 2 * embeddings + draw(SLOTS, count, hidden)
    return BlockRows(features=features, embeddings=embeddings, wanted=wanted)


def _batch(seed: int, count: int = 6) -> list[PackedSequences]:
    drawn = (text(20, seed=100 * seed + each) for each in range(count))
    return pack_texts([Example(tokens=tuple(each), prompt_len=3) for each in drawn], 50)


def _layer(model: Transformer) -> RidgeLayer:
    """Return a layer with random weights, in the model's dtype."""
    layer = RidgeLayer(_config(model)).to(model.dtype)
    generator = torch.Generator().manual_seed(2)
    for parameter in layer.parameters():
        with torch.no_grad():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return layer


def test_each_slot_is_one_ridge_regression() -> None:
    """`solve` eliminates a slot's own input; the reference regresses on all inputs at once."""
    rows, sums = _rows(0), RidgeSums(_config(tiny_model()))
    sums.add(rows)
    solved = sums.solve()
    ones = rows.features.new_ones(len(rows.features), 1)
    streams = solved["streams.weight"].view(SLOTS, 32, 64)
    shifts = solved["streams.bias"].view(SLOTS, 32)
    for slot in range(SLOTS):
        inputs = [rows.features, rows.embeddings[0], ones, *rows.embeddings[1:][slot - 1 : slot]]
        joined = torch.cat(inputs[: 3 + (slot > 0)], 1)
        expected = ridge(joined.T @ joined, joined.T @ rows.wanted[slot], len(joined))
        found = [streams[slot].T, shifts[slot][None]]
        if slot:
            found.append(solved[f"transitions.{slot - 1}.weight"].T)
        torch.testing.assert_close(torch.cat(found), expected)


def test_sums_of_parts_are_those_of_the_whole() -> None:
    rows, config = _rows(1), _config(tiny_model())
    whole, parts = RidgeSums(config), RidgeSums(config)
    whole.add(rows)
    for cut in (slice(0, 200), slice(200, None)):
        parts.add(
            BlockRows(
                features=rows.features[cut],
                embeddings=rows.embeddings[:, cut],
                wanted=rows.wanted[:, cut],
            )
        )
    assert parts.num_rows == whole.num_rows
    for name, tensor in whole.tensors.items():
        torch.testing.assert_close(parts.tensors[name], tensor, rtol=1e-12, atol=1e-9)


def test_a_block_ends_with_its_text() -> None:
    states = torch.arange(7.0)[:, None]
    begins, lasts = torch.tensor([0, 2, 5]), torch.tensor([3, 3, 6])
    rows = block_rows(states, 10 * states, begins, lasts, 3)
    assert rows.features[:, 0].tolist() == [0, 2, 5]
    assert rows.wanted[..., 0].tolist() == [[1, 3, 6], [2, 3, 6], [3, 3, 6]]
    assert rows.embeddings.equal(10 * rows.wanted)


def test_training_reads_the_states_of_completions_and_restores() -> None:
    """Equals sums over each text alone; prompts are not learned."""
    model = tiny_model(dtype=torch.float64)
    trainer = RidgeTrainer(RidgeLayer(_config(model)).double(), model)
    batch = _batch(0)
    report = trainer.step(batch)
    expected = RidgeSums(_config(model))
    for packed in batch:
        for start, end in zip(packed.cu_seqlens, packed.cu_seqlens[1:], strict=False):
            tokens = packed.tokens[start:end]
            states = _states(model, tokens.tolist())
            begins = torch.arange(
                1, len(tokens) - 2
            )  # the token after the pair is the 4th or later
            lasts = torch.full_like(begins, len(tokens) - 1)
            embeddings = model.embedding(tokens).detach()
            expected.add(block_rows(states, embeddings, begins, lasts, SLOTS))
    assert report.num_trained == expected.num_rows == 6 * 17
    for name, tensor in expected.tensors.items():
        torch.testing.assert_close(trainer.tensors()[name], tensor)

    again = RidgeTrainer(RidgeLayer(_config(model)).double(), model)
    again.restore(1, {name: each.clone() for name, each in trainer.tensors().items()})
    trainer.step(_batch(1))
    again.step(_batch(1))
    pairs = zip(trainer.layer.parameters(), again.layer.parameters(), strict=True)
    assert all(a.equal(b) for a, b in pairs)
    with pytest.raises(CheckpointError, match="inputs is missing or misshapen"):
        again.restore(1, {**trainer.tensors(), "inputs": torch.zeros(2, 2)})
    short = pack_texts([Example(tokens=(1, 2, 3), prompt_len=3)], 50)
    with pytest.raises(DataError, match="give longer texts"):
        trainer.step(short)


def test_learned_texts_are_predicted_better() -> None:
    model = tiny_model(dtype=torch.float64)
    trainer = RidgeTrainer(RidgeLayer(_config(model)).double(), model)
    before = trainer.evaluate(_batch(5), SLOTS)
    for seed in range(20):
        trainer.step(_batch(seed))
    after = trainer.evaluate(_batch(5), SLOTS + 3)
    assert len(after.overlap) == SLOTS
    assert all(b > a for a, b in zip(before.overlap, after.overlap, strict=True))


@torch.no_grad()
def _states(model: Transformer, tokens: Sequence[int]) -> Tensor:
    attention = PackedAttention((0, len(tokens)))
    taps = _config(model).taps
    positions = torch.arange(len(tokens))
    found = model.forward_with_features(torch.tensor(tokens), positions, attention, taps).features
    assert found is not None
    return found


def _seen(name: str, tokens: Sequence[int], start: int, end: int) -> Observed:
    return Observed(
        request_id=name, tokens=tokens, start=start, num_tokens=end - start, prompt_len=3
    )


@pytest.mark.parametrize("ids", [None, list(range(3, 120, 2))])
def test_a_draft_is_the_draws_of_its_states(ids: list[int] | None) -> None:
    """Each node is argmax of its slot's logits plus the noise of its position."""
    model = tiny_model(dtype=torch.float64)
    chosen = None if ids is None else torch.tensor(ids)
    drafter = RidgeDrafter(_layer(model), model, draft_ids=chosen)
    layer, tokens = _layer(model), text(12)
    states = _states(model, tokens)
    drafter.observe(
        [_seen("a", tokens, 0, 7), _seen("b", tokens, 0, 11)], states[[*range(7), *range(11)]]
    )
    sampling = SamplingParams(temperature=0.7)
    request = Draftable(
        request_id="b", tokens=tokens, prompt_len=3, sampling=sampling, max_depth=50
    )
    (tree,) = drafter.propose([request], Strategy(depth=9, size=9), KeyedNoise([12], 128))

    entries = torch.arange(128) if chosen is None else chosen
    head = model.head.weight[entries]
    block = layer.block(states[10:11], model.embedding(torch.tensor([tokens[11]])))
    expected = []
    for slot in range(1, SLOTS + 1):
        before = model.embedding(torch.tensor([expected[-1] if expected else tokens[11]]))
        logits = layer.move(block[:, slot - 1], slot, before) @ head.T
        noise = gumbel_noise(torch.tensor([KEY]), torch.tensor([11 + slot]), 128, entries)
        expected.append(int(entries[(logits / 0.7 + noise).argmax()]))
    assert tree.tokens == tuple(expected)
    assert tree.parents == (0, 1, 2, 3)


def test_a_request_is_drafted_only_after_the_token_before_its_root() -> None:
    model = tiny_model(dtype=torch.float64)
    drafter, tokens = RidgeDrafter(_layer(model), model), text(12)
    states, strategy = _states(model, tokens), Strategy(depth=2, size=2)

    def ask(names: str, length: int) -> list[int]:
        requests = [
            Draftable(
                request_id=name,
                tokens=tokens[:length],
                prompt_len=3,
                sampling=SamplingParams(),
                max_depth=9,
            )
            for name in names
        ]
        noise = KeyedNoise([length] * len(names), 128)
        return [tree.size for tree in drafter.propose(requests, strategy, noise)]

    drafter.observe([_seen("a", tokens, 0, 8)], states[:8])
    assert ask("ab", 9) == [2, 0]
    assert ask("a", 10) == [0]
    drafter.observe([_seen("a", tokens, 8, 9)], states[8:9])
    assert ask("a", 10) == [2]
    drafter.refresh()
    assert ask("a", 10) == [0]


def test_drafts_change_no_text() -> None:
    """Law 1 with this drafter; trained on the texts, it is often right."""
    model = tiny_model(dtype=torch.float64)
    prompts = [tuple(text(4 + index, seed=index)) for index in range(6)]
    limits = EngineLimits(max_running=6, max_step_tokens=200, max_len=60)

    def write(speculation: Speculation | None) -> tuple[list[Completion], float]:
        engine = RolloutEngine(model, lambda ids: "".join(map(chr, ids)), limits)
        engine.speculate(speculation)
        meter = RolloutMeter()
        requests = [
            Request(
                request_id=str(index),
                prompt_tokens=prompt,
                noise_key=noise_key(3, index),
                sampling=SamplingParams(max_tokens=30, temperature=0.5),
            )
            for index, prompt in enumerate(prompts)
        ]
        return engine.generate(requests, meter.add), meter.report().accept_length

    plain, _ = write(None)
    trainer = RidgeTrainer(RidgeLayer(_config(model)).double(), model)
    texts = [
        Example(tokens=prompt + each.tokens, prompt_len=len(prompt))
        for prompt, each in zip(prompts, plain, strict=True)
    ]
    trainer.step(pack_texts(texts, 100))
    for strategy in (Strategy(depth=3, size=3), Strategy(depth=4, width=3, size=9)):
        drafter = RidgeDrafter(trainer.layer, model)
        drafted, accept_length = write(Speculation.fixed(drafter, strategy))
        assert [each.tokens for each in drafted] == [each.tokens for each in plain]
        assert accept_length > 1.1


def test_a_saved_drafter_is_read_again(tmp_path: Path) -> None:
    model, tokenizer = tiny_model(dtype=torch.float64), tiny_tokenizer()
    layer, record = _layer(model), TrainingRecord(steps=1, tokens=9, unroll_steps=1)
    save_drafter(tmp_path / "d", layer, None, identity("toy", model, tokenizer), record)
    loaded = load_drafter(tmp_path / "d", model, tokenizer, strict_weights=True)
    assert loaded.layer.config == layer.config
    assert all(
        a.equal(b) for a, b in zip(loaded.layer.parameters(), layer.parameters(), strict=True)
    )
    with pytest.raises(ConfigError, match="only an EAGLE drafter is exported"):
        _ = loaded.eagle
    description = tmp_path / "d" / "drafter.json"
    description.write_text(description.read_text().replace('"slots": 4', '"slots": 99'))
    with pytest.raises(ConfigError, match="slots = 99"):
        load_drafter(tmp_path / "d", model, tokenizer, strict_weights=True)
