"""Texts of a target with its states, and the acceptance of a drafter that is trained on them."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from longtail.bench.common.own import open_own
from longtail.bench.common.process import Log
from longtail.bench.recipes.candidates import Candidate
from longtail.bench.recipes.options import RecipesBenchOptions
from longtail.drafter.eagle.fresh import commonest_tokens, fresh_drafter
from longtail.drafter.eagle.layer import default_layers
from longtail.drafter.training.reader import training_taps
from longtail.drafter.training.texts import pack_texts, write_texts
from longtail.drafter.training.trainer import DrafterTrainer, TrainerSettings
from longtail.engine.engine import RolloutEngine
from longtail.engine.limits import EngineLimits
from longtail.model.attention import PackedAttention
from longtail.model.transformer import Transformer
from longtail.rl.data.examples import Example
from longtail.rl.optim import OptimizerSettings
from longtail.speculation.taps import Taps
from longtail.system.device import multiplies_bfloat16
from longtail.types import SamplingParams

_DEPTHS = 6
_MICRO_TOKENS = 1024
_RUNNING, _STEP_TOKENS = 64, 512
_SAMPLE = 16
"""Texts on which the size of features is measured."""
_SEED = 0
_SHORTEST = 12
"""Tokens of the shortest text that is used: all measured depths lie in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Texts of a target, and its states at each token, so that no recipe computes them again."""

    target: Transformer
    eos_ids: Sequence[int]
    training: Sequence[Example]
    """Texts in the order in which a run would generate them."""
    heldout: Sequence[Example]
    taps: Taps
    states: dict[tuple[int, ...], Tensor]

    @property
    def num_trainable(self) -> int:
        """Number of generated tokens to train on."""
        return sum(len(text.tokens) - text.prompt_len for text in self.training)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Acceptance after some trained tokens.

    Example: Point(num_tokens=10_240, accept_len=1.72, overlap=(0.43, 0.4), seconds=12.0)
    """

    num_tokens: int
    accept_len: float
    overlap: tuple[float, ...]
    seconds: float
    """Seconds of training until then, without the target's states."""


def collect(options: RecipesBenchOptions, log: Log) -> Corpus:
    """Complete prompts with the target until there are enough tokens, and keep its states."""
    num_heldout = -(-options.heldout // options.samples)
    own = open_own(options.model, options.prompts, options.dtype, 20_000, log)
    target, tokenizer = own.target.model, own.target.tokenizer
    limits = EngineLimits(
        max_running=_RUNNING,
        max_step_tokens=_STEP_TOKENS,
        max_len=max(map(len, own.prompts)) + options.max_tokens,
    )
    engine = RolloutEngine(target, tokenizer.decode, limits)
    sampling = SamplingParams(max_tokens=options.max_tokens, stop_token_ids=tokenizer.eos_ids)
    each = max(_RUNNING // options.samples, 1)
    texts: list[list[Example]] = []
    for first in range(0, len(own.prompts), each):
        found = write_texts(
            engine.generate,
            own.prompts[first : first + each],
            sampling,
            samples=options.samples,
            seed=_SEED + first,
        )
        texts.append([text for text in found if len(text.tokens) >= _SHORTEST])
        written = sum(len(t.tokens) - t.prompt_len for part in texts for t in part)
        log(f"{written:,} tokens generated")
        if written >= max(options.points) + num_heldout * options.samples * options.max_tokens:
            break
    together = [text for part in texts for text in part]
    heldout, training = together[: options.heldout], together[options.heldout :]
    taps = Taps(layers=default_layers(target.config.num_layers), final=True)
    return Corpus(
        target=target,
        eos_ids=tokenizer.eos_ids,
        training=training,
        heldout=heldout,
        taps=taps,
        states={text.tokens: states for text, states in _states(target, together, taps)},
    )


def _states(
    target: Transformer, texts: Sequence[Example], taps: Taps
) -> Iterator[tuple[Example, Tensor]]:
    for start in range(0, len(texts), _RUNNING):
        part = texts[start : start + _RUNNING]
        tokens = torch.tensor([token for text in part for token in text.tokens])
        ends = [0]
        for text in part:
            ends.append(ends[-1] + len(text.tokens))
        positions = torch.cat([torch.arange(b - a) for a, b in pairwise(ends)])
        with torch.no_grad():
            features = target.forward_with_features(
                tokens, positions, PackedAttention(tuple(ends)), taps
            ).features
        assert features is not None, "layers are tapped"
        for text, (first, last) in zip(part, pairwise(ends), strict=True):
            yield text, features[first:last].clone()


def curve(one: Candidate, corpus: Corpus, options: RecipesBenchOptions) -> list[Point]:
    """Train a fresh drafter once over the texts, in their order, and measure it at each point."""
    target, recipe = corpus.target, one.recipe
    config = recipe.config(target.config)
    sample = pack_texts(corpus.training[:_SAMPLE], 4 * _MICRO_TOKENS)[0]
    layer = fresh_drafter(config, target, sample, torch.Generator().manual_seed(_SEED))
    size, taps = recipe.draft_vocab_size, training_taps(config.taps)
    trainer = DrafterTrainer(
        layer,
        target,
        TrainerSettings(
            unroll_steps=recipe.unroll_steps,
            optimizer=OptimizerSettings(learning_rate=recipe.learning_rate, warmup_steps=10),
            matrix_rate=recipe.matrix_rate,
            autocast=options.dtype == "bfloat16" and multiplies_bfloat16(target.device),
            fit_tokens=recipe.fit_tokens,
        ),
        draft_ids=commonest_tokens(corpus.training, size, corpus.eos_ids) if size else None,
        lookup=lambda tokens, _: corpus.taps.pick(taps, corpus.states[tuple(tokens)]),
    )
    heldout = pack_texts(corpus.heldout, _MICRO_TOKENS)
    points: list[Point] = []
    num_tokens, seconds, wanted = 0, 0.0, list(options.points)
    for batch in _batches(corpus.training, recipe.batch_tokens):
        began = time.perf_counter()
        num_tokens += trainer.step(pack_texts(batch, _MICRO_TOKENS)).num_trained
        is_due = bool(wanted) and num_tokens >= wanted[0]
        if is_due:
            trainer.solve_start()
        seconds += time.perf_counter() - began
        if is_due:
            wanted.pop(0)
            found = trainer.evaluate(heldout, _DEPTHS)
            points.append(
                Point(
                    num_tokens=num_tokens,
                    accept_len=found.accept_len,
                    overlap=found.overlap,
                    seconds=seconds,
                )
            )
        if not wanted:
            break
    return points


def _batches(texts: Sequence[Example], size: int) -> Iterator[list[Example]]:
    batch: list[Example] = []
    for text in texts:
        if batch and sum(len(each.tokens) for each in (*batch, text)) > size:
            yield batch
            batch = []
        batch.append(text)
    if batch:
        yield batch
