"""The recipe of a fresh drafter follows from the target's shape."""

from dataclasses import replace

import pytest

from longtail.drafter.eagle.fresh import recipe_for
from support.tiny_models import tiny_config


@pytest.mark.parametrize(
    ("vocabulary", "drafted"), [(170, 0), (16_384, 0), (49_152, 8192), (151_936, 8192)]
)
def test_only_a_large_vocabulary_is_reduced(vocabulary: int, drafted: int) -> None:
    recipe = recipe_for(replace(tiny_config(), vocab_size=vocabulary))
    assert recipe.draft_vocab_size == drafted


@pytest.mark.parametrize("hidden", [64, 576, 2048, 8192])
def test_rows_of_the_closed_form_start_are_bounded_in_bytes(hidden: int) -> None:
    recipe = recipe_for(replace(tiny_config(), hidden_size=hidden))
    assert 1000 < recipe.fit_tokens <= 131_072
    assert recipe.fit_tokens * 3 * hidden * 2 <= 2**28
