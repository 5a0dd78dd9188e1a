"""Training on an engine's features equals training with a pass of the target."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from longtail.drafter.eagle.fresh import fresh_drafter
from longtail.drafter.eagle.layer import EagleConfig, Recipe
from longtail.drafter.eagle.target_states import TargetReader, training_taps
from longtail.drafter.eagle.unroll import Pairs
from longtail.drafter.training.buffer import DrafterBuffer, SequenceSnapshot
from longtail.drafter.training.spot import SpotTrainer
from longtail.drafter.weights import DrafterWeights, copy_parameters
from longtail.engine.engine import RolloutEngine
from longtail.engine.request import EngineLimits
from longtail.engine.speculation.feature_store import FeatureStore
from longtail.engine.speculation.speculator import Speculation
from longtail.model.transformer import Transformer
from longtail.rl.data.examples import Example
from longtail.rl.packing import pack_sequences
from longtail.sampling import noise_key
from longtail.speculation.strategy import Strategy
from support.drafters import ScriptedDrafter, ragged
from support.engine_requests import request_of
from support.spot_training import SETTINGS as SHORT
from support.spot_training import counting
from support.tiny_models import tiny_model

SETTINGS = replace(SHORT, batch_tokens=80, tokens_per_micro_batch=36)
LIMITS = EngineLimits(max_running=8, max_step_tokens=80, max_len=64)
TREE = Strategy(depth=3, width=2, size=6)


@dataclass
class Workplace:
    """An engine that keeps features, with a count of the tokens that the target computes again."""

    config: EagleConfig
    target: Transformer
    store: FeatureStore
    own: list[SequenceSnapshot]
    """Texts of 6 to 45 tokens that the engine generated."""
    num_computed: int = 0

    @staticmethod
    def at(recipe: Recipe) -> "Workplace":
        target = tiny_model(dtype=torch.float64)
        layers = (0, 1) if recipe == "eagle3" else ()
        config = EagleConfig(recipe=recipe, target=target.config, layers=layers, window=8)
        engine = RolloutEngine(target, str, LIMITS)
        store = FeatureStore(training_taps(config.taps), 10**6)
        drafter = ScriptedDrafter({t.request_id: t.tokens for t in write(engine)}, ragged(1))
        engine.speculate(replace(Speculation.fixed(drafter, TREE), features=store))
        place = Workplace(config, target, store, write(engine))
        target.layers[0].register_forward_pre_hook(place._count)
        return place

    def _count(self, _: object, inputs: tuple[Tensor, ...]) -> None:
        self.num_computed += len(inputs[0])

    def spot(self, *, reuses: bool) -> SpotTrainer:
        """Return a trainer that draws the texts of the store first, in both cases."""
        sample = pack_sequences([Example(tokens=counting(1, 40).tokens, prompt_len=3)], 100)[0]
        generator = torch.Generator().manual_seed(3)
        layer = fresh_drafter(self.config, self.target, sample, generator).to(self.target.dtype)
        store = self.store if reuses else Forgetful(self.store)
        spot = SpotTrainer(layer, self.target, SETTINGS, store=store)
        spot.begin(DrafterWeights(version=1, tensors=copy_parameters(layer)))
        return spot


@dataclass
class Forgetful:
    """A store that has texts but does not find them."""

    store: FeatureStore

    def has(self, tokens: Sequence[int]) -> bool:
        return self.store.has(tokens)

    def find(self, tokens: Sequence[int]) -> None:
        """Find nothing."""


def write(engine: RolloutEngine) -> list[SequenceSnapshot]:
    requests = [
        request_of(
            f"own/{n}@0#{s}",
            range(5 + n, 8 + 2 * n),
            noise_key(4, n, s),
            f"own/{n}@0",
            max_tokens=3 + 4 * n,
        )
        for n in range(9)
        for s in range(2)
    ]
    done = engine.generate(requests)
    return [
        SequenceSnapshot.of(request, each, 0) for request, each in zip(requests, done, strict=True)
    ]


def buffer_of(*texts: SequenceSnapshot) -> DrafterBuffer:
    buffer = DrafterBuffer(10**6, seed=4)
    buffer.add(texts)
    return buffer


@pytest.mark.slow
def test_training_with_reused_features_equals_training_without() -> None:
    """Weights, moments and measurements agree, also for windows of texts of other engines."""
    place, num_steps = Workplace.at("eagle3"), 5
    # An own text that is cut would be computed without its beginning.
    own = [text for text in place.own if len(text.tokens) <= SETTINGS.tokens_per_micro_batch]
    texts = [*own, *(counting(n, 9 + 3 * n) for n in range(12))]
    assert max(len(text.tokens) for text in texts) > SETTINGS.tokens_per_micro_batch
    reports, replicas, states, passes = [], [], [], []
    for reuses in (False, True):
        spot, before = place.spot(reuses=reuses), place.num_computed
        trainer, buffer = spot._trainer, buffer_of(*texts)
        reports.append(spot.train(buffer, lambda t=trainer: t.steps >= num_steps))
        replicas.append(reports[-1].replica)
        states.append(trainer.tensors())
        passes.append(place.num_computed - before)
    without, with_reuse = reports
    assert (without.num_steps, without.num_reused) == (num_steps, 0)
    assert 0.2 < with_reuse.num_reused / with_reuse.num_tokens < 0.8
    assert without.num_tokens == with_reuse.num_tokens
    assert passes[1] < passes[0]
    assert any(name.startswith("optimizer/") for name in states[0])
    torch.testing.assert_close(states[1], states[0], rtol=1e-12, atol=1e-12)
    one, other = replicas
    assert other.accept_len == pytest.approx(one.accept_len, rel=1e-12)


def test_a_window_has_the_states_of_its_whole_text() -> None:
    place = Workplace.at("eagle1")
    spot, buffer = place.spot(reuses=True), buffer_of(*place.own)
    reader = TargetReader(place.target, torch.float64, place.config.taps)
    cut = set()
    for _ in range(6):
        for window in spot._looked_up(buffer.batch(80, max_len=20)):
            (packed,) = pack_sequences([window.sequence], 1000)
            whole = reader.read(packed, Pairs.of(packed)).features
            states = spot._trainer.reader.found[window.tokens][:-1]  # the last may be NaN
            expected = whole[window.start : window.start + len(states)]
            torch.testing.assert_close(states, expected, rtol=0.0, atol=1e-12)
            cut.add((window.start > 0, len(window.tokens) < len(window.sequence.tokens)))
    assert cut == {(False, False), (False, True), (True, True)}
