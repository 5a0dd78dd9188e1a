"""The start of an EAGLE-1 drafter: its regression, and what it predicts."""

import torch

from longtail.drafter.eagle.fresh import fresh_drafter
from longtail.drafter.eagle.layer import EagleConfig, EagleLayer
from longtail.drafter.ridge.trainer import regress
from longtail.drafter.training.eagle import DrafterTrainer, TrainerSettings
from longtail.model.attention import PackedAttention
from longtail.model.transformer import Transformer
from longtail.rl.data.examples import Example
from longtail.rl.packing import pack_texts
from support.regression import ridge
from support.tiny_models import tiny_model


def _texts(seed: int, count: int) -> list[Example]:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(5, 45, (count, 20), generator=generator).tolist()
    return [Example(tokens=tuple(each), prompt_len=3) for each in drawn]


def _layer(target: Transformer) -> EagleLayer:
    config = EagleConfig(recipe="eagle1", target=target.config, window=8)
    sample, generator = pack_texts(_texts(0, 4), 50)[0], torch.Generator().manual_seed(3)
    return fresh_drafter(config, target, sample, generator).to(target.dtype)


def test_the_layer_is_the_regression_of_the_next_state() -> None:
    target, texts = tiny_model(dtype=torch.float64), _texts(1, 50)
    layer, asked = _layer(target), []
    count = regress(
        layer, target, texts, num_tokens=16 * 40 - 3, budget=60, check=lambda: asked.append(True)
    )
    assert (count, len(asked)) == (16 * 40, 14), "before each pass of three texts"
    inputs, wanted, none = [], [], torch.zeros(1, 32, dtype=torch.float64)
    for each in texts[:40]:
        tokens = torch.tensor(each.tokens)
        with torch.no_grad():
            states = target(tokens, torch.arange(20), PackedAttention((0, 20)))[3:19]
            embeddings = target.embedding(tokens[3:19])
        # The signal of a text is zero before and after it.
        inputs.append(torch.cat((torch.cat((embeddings, none)), torch.cat((none, states))), 1))
        wanted += [states, none]
    rows, following = torch.cat(inputs), torch.cat(wanted)
    expected = ridge(rows.T @ rows, rows.T @ following, 16 * 40)
    torch.testing.assert_close(layer.fc.weight.T, expected, rtol=1e-2, atol=2e-4)
    stream, _ = layer.make_input(states, embeddings)
    attended = torch.randn(16, 4, 16, dtype=torch.float64)
    found = layer.finish(stream, attended).scored
    torch.testing.assert_close(found, torch.cat((embeddings, states), 1) @ layer.fc.weight.T)


def test_the_start_predicts_held_out_texts_better_than_random_weights() -> None:
    target = tiny_model()
    trainer = DrafterTrainer(_layer(target), target, TrainerSettings(unroll_steps=2))
    heldout = pack_texts(_texts(99, 20), 50)
    before = trainer.evaluate(heldout, 2)
    regress(trainer.layer, target, _texts(1, 200), num_tokens=10**6, budget=500)
    after = trainer.evaluate(heldout, 2)
    assert all(b > a + 0.02 for a, b in zip(before.overlap, after.overlap, strict=True))
    trainer.step(pack_texts(_texts(2, 20), 50))
    assert not torch.equal(trainer.layer.output.weight, torch.zeros(32, 64)), "gradients reach it"
