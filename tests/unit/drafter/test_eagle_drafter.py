"""The EAGLE drafter's drafts equal its training pass, for any order of observations."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from longtail.drafter.eagle.drafter import EagleDrafter
from longtail.drafter.eagle.layer import EagleLayer, Recipe
from longtail.drafter.eagle.unroll import Pairs, unroll
from longtail.model.transformer import Transformer
from longtail.rl.packing import lay_out
from longtail.speculation.strategy import Strategy
from longtail.speculation.tree import MAX_NODES, DraftTree
from support.eagle_requests import (
    PROMPT_LEN,
    WINDOW,
    features_of,
    keyed_noise,
    make_layer,
    observe,
    text,
)
from support.engine_requests import draftable, observed
from support.tiny_models import tiny_model


def ask(
    drafter: EagleDrafter,
    tokens: Sequence[int],
    strategy: Strategy,
    *,
    temperature: float = 1.0,
    name: str = "a",
    coupled: bool = True,
) -> DraftTree:
    request = draftable(name, tokens, PROMPT_LEN, temperature=temperature)
    noise = keyed_noise([len(tokens)], 128) if coupled else None
    (tree,) = drafter.propose([request], strategy, noise)
    return tree


def drafter_of(tokens: Sequence[int], recipe: Recipe = "eagle3") -> tuple[EagleDrafter, Tensor]:
    """A drafter over a random target, and the features of a text."""
    model = tiny_model(dtype=torch.float64)
    drafter = EagleDrafter(make_layer(model, recipe), model)
    return drafter, features_of(model, drafter, tokens)


@torch.no_grad()
def defined_scores(
    layer: EagleLayer, model: Transformer, tokens: Sequence[int], features: Tensor, tree: DraftTree
) -> list[Tensor]:
    """Return the logits at the root and along a chain from the training pass.

    The features of drafted tokens are what no draft can know: any numbers do.
    """
    whole = [*tokens, *tree.tokens]
    packed = lay_out([whole], [1])
    pairs = Pairs.of(packed)
    padding = torch.full((len(whole) - len(features), features.shape[1]), 7.0).to(features)
    given = torch.cat((features, padding))
    embedded = model.embedding(packed.tokens)
    outputs = unroll(layer, given[pairs.rows], embedded[pairs.rows + 1], pairs, 1 + tree.size)
    root = len(tokens) - 2
    return [model.logits(out.scored[root + s : root + s + 1])[0] for s, out in enumerate(outputs)]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["eagle1", "eagle3"])
@pytest.mark.parametrize(
    ("length", "temperature"), [(6, 0.0), (23, 1.0), (3 * WINDOW + MAX_NODES + 40, 0.6)]
)
def test_a_draft_equals_the_training_pass(recipe, length, temperature):
    """Pairing of features and tokens, window, positions and noise are all checked here."""
    model = tiny_model(dtype=torch.float64)
    layer = make_layer(model, recipe)
    drafter = EagleDrafter(make_layer(model, recipe), model)
    tokens = text(length)
    features = features_of(model, drafter, tokens[:-1])
    for start in range(0, length - 1, 3):  # a few at a time, as after verification
        observe(drafter, "a", tokens, features, start, min(start + 3, length - 1))
    tree = ask(drafter, tokens, Strategy(depth=4), temperature=temperature)
    noise = keyed_noise([length], 128)
    assert tree.parents == (0, 1, 2, 3)
    for depth, logits in enumerate(defined_scores(layer, model, tokens, features, tree)[:-1], 1):
        scores = logits / (temperature or 1.0)
        scores = scores + noise.at_depth(depth)[0] if temperature else scores
        best = scores.topk(2)
        assert tree.tokens[depth - 1] == best.indices[0]
        # float64 sums in another order
        lead = float(best.values[0] - best.values[1])
        assert tree.margins[depth - 1] == pytest.approx(lead, abs=1e-9)


def test_a_recomputed_request_gets_the_same_draft():
    """A preempted request is prefilled again from its first token."""
    tokens = text(30)
    drafter, features = drafter_of(tokens)
    observe(drafter, "a", tokens, features, 0, 29)
    before = ask(drafter, tokens, Strategy(depth=4))
    observe(drafter, "a", tokens, features, 0, 16)
    assert ask(drafter, tokens, Strategy(depth=4)).size == 0  # not all tokens are observed
    observe(drafter, "a", tokens, features, 16, 29)
    assert ask(drafter, tokens, Strategy(depth=4)) == before


def test_a_request_that_shares_the_beginning_of_a_prompt_shares_its_features():
    """Its draft is that of a request whose every token was observed."""
    model = tiny_model(dtype=torch.float64)
    drafter = EagleDrafter(make_layer(model, "eagle3"), model)
    one, beginning = text(23), 20
    other = [*one[:beginning], *text(3, seed=1)]

    def watch(name: str, tokens: Sequence[int], start: int, prompt_len: int) -> None:
        features = features_of(model, drafter, tokens)[start:prompt_len]
        drafter.observe([observed(name, tokens, start, prompt_len, prompt_len)], features)

    watch("whole", other, 0, len(other) - 1)
    expected = ask(drafter, other, Strategy(depth=3), name="whole")
    drafter.windows.clear()
    watch("one", one, 0, len(one) - 1)
    watch("other", other, beginning, len(other) - 1)
    assert ask(drafter, other, Strategy(depth=3), name="other") == expected
    assert drafter.windows.of["other"].base < beginning


def test_a_request_first_observed_in_mid_text_copies_no_prompt():
    """A drafter that started late once put a sibling's prompt before the middle of a text."""
    tokens = text(40)
    drafter, features = drafter_of(tokens)
    observe(drafter, "a", tokens, features, 0, PROMPT_LEN)
    observe(drafter, "b", tokens, features, 30, 32)
    window = drafter.windows.of["b"]
    assert (window.base, window.end) == (30, 2)


def test_a_forgotten_requests_row_is_reused():
    tokens = text(12)
    drafter, features = drafter_of(tokens, "eagle1")
    rows = drafter.windows.features.shape[0]
    for name in range(10 * rows):
        observe(drafter, str(name), tokens, features, 0, 11)
        drafter.forget(str(name))
    assert drafter.windows.features.shape[0] == rows
    drafter.forget("a stranger")


def test_a_refresh_drops_features_of_the_old_policy():
    tokens = text(12)
    drafter, features = drafter_of(tokens, "eagle1")
    observe(drafter, "a", tokens, features, 0, 11)
    drafter.refresh()
    assert ask(drafter, tokens, Strategy(depth=3)).size == 0
