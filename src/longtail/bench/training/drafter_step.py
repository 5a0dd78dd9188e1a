"""`longtail bench drafter --model MODEL`: updates of spot training at a real vocabulary.

    computed    every update computes the target's states of its texts
    kept        the states are those that the engine kept when it wrote the texts

Both make the same update: a fresh drafter's recipe, in batches and micro-batches of spot training.
Texts are random tokens of heavy-tailed lengths (`training.step`). Contestants take turns.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from longtail.assembly.models import model_directory
from longtail.assembly.worker import SPOT_MICRO_TOKENS
from longtail.bench.common.card import Table, print_card
from longtail.bench.common.process import progress
from longtail.bench.common.timing import Spread, paired, pin_threads, ratios
from longtail.bench.training.options import DrafterBenchOptions
from longtail.bench.training.step import make_texts
from longtail.config.rl import SpotSection
from longtail.drafter.eagle.layer import EagleLayer
from longtail.drafter.eagle.recipe import DrafterRecipe, recipe_for
from longtail.drafter.training.reader import training_taps
from longtail.drafter.training.trainer import DrafterTrainer, TrainerReport, TrainerSettings
from longtail.model.attention import PackedAttention
from longtail.model.hf.model import load_model
from longtail.model.transformer import Transformer
from longtail.rl.optim import OptimizerSettings
from longtail.rl.packing import lay_out, pack
from longtail.system.device import multiplies_bfloat16
from longtail.types import PackedSequences

_UPDATES = 4
"""Updates of a turn."""


@final
class SpotUpdates:
    """A fresh drafter, the texts of its updates, and the states of those texts."""

    def __init__(self, target: Transformer, texts: Sequence[tuple[int, ...]], prompt_len: int):
        self._target, self._recipe = target, recipe_for(target.config)
        self._states: dict[tuple[int, ...], Tensor] = {}
        self.batches = _batches(texts, prompt_len)
        self._trainers = {"computed": self._trainer({}), "kept": self._trainer(self._states)}
        taps = training_taps(self._trainers["kept"].layer.config.taps)
        for text in texts:
            tokens = text[:SPOT_MICRO_TOKENS]
            packed = lay_out([tokens], [prompt_len])
            with torch.no_grad():
                states = target.forward_with_features(
                    packed.tokens, packed.positions, PackedAttention(packed.cu_seqlens), taps
                ).features
            assert states is not None, "the final state is tapped"
            self._states[tokens] = states

    def run(self, name: str) -> list[TrainerReport]:
        """Make the updates of a turn."""
        return [self._trainers[name].step(batch) for batch in self.batches]

    def _trainer(self, states: Mapping[tuple[int, ...], Tensor]) -> DrafterTrainer:
        recipe, config = self._recipe, self._recipe.config(self._target.config)
        layer = EagleLayer(config)
        layer.initialize(torch.Generator().manual_seed(0))
        size = config.draft_vocab_size
        return DrafterTrainer(
            layer,
            self._target,
            _settings(recipe, multiplies_bfloat16(self._target.device)),
            draft_ids=torch.arange(size) if size else None,
            lookup=lambda tokens, _: states.get(tuple(tokens)),
        )


def _settings(recipe: DrafterRecipe, autocast: bool) -> TrainerSettings:
    return TrainerSettings(
        unroll_steps=recipe.unroll_steps,
        optimizer=OptimizerSettings(learning_rate=recipe.learning_rate),
        matrix_rate=recipe.matrix_rate,
        autocast=autocast,
    )


def _batches(texts: Sequence[tuple[int, ...]], prompt_len: int) -> list[list[PackedSequences]]:
    """Return the micro-batches of each update; texts are cut as spot training cuts them."""
    cut = [text[:SPOT_MICRO_TOKENS] for text in texts]
    size = len(cut) // _UPDATES
    parts = [cut[i * size : (i + 1) * size] for i in range(_UPDATES)]
    prompts = [prompt_len] * size
    return [[each.packed for each in pack(part, prompts, SPOT_MICRO_TOKENS)] for part in parts]


def run(options: DrafterBenchOptions) -> int:
    """Measure in turn, print the card and JSON."""
    assert options.model is not None
    pin_threads(options.threads)
    directory = model_directory(options.model, progress("drafter"), field="--model")
    target = load_model(directory, torch.bfloat16)
    target.eval().pack()
    batch_tokens = SpotSection().batch_tokens
    count = _UPDATES * max(1, round(batch_tokens / (options.mean_tokens + options.prompt_tokens)))
    texts = make_texts(count, options.mean_tokens, options.prompt_tokens, target.config.vocab_size)
    updates = SpotUpdates(target, texts, options.prompt_tokens)
    reports: dict[str, list[TrainerReport]] = {"computed": [], "kept": []}
    functions = {name: partial(_turn, updates, name, own) for name, own in reports.items()}
    seconds = paired(functions, repeats=options.repeats)
    tokens = sum(each.num_trained for each in reports["kept"][:_UPDATES])
    rates = {name: Spread.of([tokens / s for s in own]) for name, own in seconds.items()}
    result = {
        "bench": "drafter",
        "model": options.model,
        "threads": options.threads,
        "trained_tokens": tokens,
        "tokens_per_s": {name: own.numbers() for name, own in rates.items()},
        "kept_speedup": ratios(seconds["computed"], seconds["kept"]).numbers(),
        "reused_share": sum(r.num_reused for r in reports["kept"][:_UPDATES]) / tokens,
        "losses": {name: [r.loss for r in own[:_UPDATES]] for name, own in reports.items()},
    }
    print_card(
        [_table(options, rates, seconds)],
        result,
        sentences=[
            f"With kept states spot training trains {rates['kept'].median:,.0f} tokens/s, "
            f"without {rates['computed'].median:,.0f}."
        ],
        json_only=options.json_only,
    )
    return 0


def _turn(updates: SpotUpdates, name: str, reports: list[TrainerReport]) -> None:
    reports += updates.run(name)


def _table(
    options: DrafterBenchOptions,
    rates: Mapping[str, Spread],
    seconds: Mapping[str, Sequence[float]],
) -> Table:
    columns: dict[str, Any] = {
        "states": lambda name: name,
        "trained tokens/s": lambda name: rates[name].text(0),
        f"s for {_UPDATES} updates": lambda name: Spread.of(seconds[name]),
    }
    title = f"drafter training, {options.model}, {options.threads} thread(s)"
    return Table(title, columns, list(rates))
