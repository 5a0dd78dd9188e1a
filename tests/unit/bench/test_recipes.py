"""The comparison of recipes: each trains on the same texts, and is measured at the same points."""

import pytest
import torch

from longtail.bench.recipes.candidates import candidate
from longtail.bench.recipes.measure import Corpus, Point, _states, curve
from longtail.bench.recipes.options import RECIPE_NAMES, RecipesBenchOptions
from longtail.drafter.eagle.layer import default_layers
from longtail.rl.data.examples import Example
from longtail.speculation.taps import Taps
from support.tiny_models import tiny_model

OPTIONS = RecipesBenchOptions(model="tiny", points=(500, 1000), dtype="float32")


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    target = tiny_model()
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(5, 45, (80, 24), generator=generator).tolist()
    texts = [Example(tokens=tuple(each), prompt_len=4) for each in drawn]
    taps = Taps(layers=default_layers(target.config.num_layers), final=True)
    return Corpus(
        target=target,
        eos_ids=(2,),
        training=texts[:70],
        heldout=texts[70:],
        taps=taps,
        states={text.tokens: states for text, states in _states(target, texts, taps)},
    )


def trained(name: str, corpus: Corpus) -> list[Point]:
    return curve(candidate(name, corpus.target.config), corpus, OPTIONS)


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_a_recipe_is_measured_at_each_point_and_the_same_each_time(name, corpus):
    points = trained(name, corpus)
    assert [point.num_tokens // 100 for point in points] == [
        point.num_tokens // 100 for point in trained("recipe", corpus)
    ]
    assert all(1.0 <= point.accept_len <= 7.0 for point in points)
    assert all(len(point.overlap) == 6 for point in points)
    again = trained(name, corpus)
    assert [point.accept_len for point in again] == [point.accept_len for point in points]


def test_recipes_differ_from_the_chosen_one_only_in_what_their_names_say(corpus):
    chosen = candidate("recipe", corpus.target.config).recipe
    for name in RECIPE_NAMES:
        own = candidate(name, corpus.target.config).recipe
        assert (own.window, own.draft_vocab_size) == (chosen.window, chosen.draft_vocab_size)
        assert bool(own.layers) == (own.recipe == "eagle3")
        assert bool(own.fit_tokens) == (name in ("recipe", "steps"))
