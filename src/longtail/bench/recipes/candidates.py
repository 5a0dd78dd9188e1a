"""The recipes of a fresh drafter that are compared, the chosen one first."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from longtail.config.drafter import UNROLL_STEPS, DrafterTrainSection
from longtail.drafter.eagle.layer import Recipe, default_layers
from longtail.drafter.eagle.recipe import DrafterRecipe, recipe_for
from longtail.model.transformer import ModelConfig

_STEPS_AFTER = 8192
"""Tokens of the closed-form start of `steps`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A recipe with a name and its description for the card."""

    name: str
    about: str
    recipe: DrafterRecipe


def candidate(name: str, target: ModelConfig) -> Candidate:
    """Return a recipe by its name; all share window and draft vocabulary of the chosen one."""
    about, make = _RECIPES[name]
    return Candidate(name=name, about=about, recipe=make(recipe_for(target), target))


def _random(
    recipe: Recipe, *, is_fast: bool, adamw: bool = False
) -> Callable[[DrafterRecipe, ModelConfig], DrafterRecipe]:
    """Return a recipe from random weights; fast ones have the rates of `drafter train`."""
    train = DrafterTrainSection()
    rates = (train.learning_rate, train.matrix_rate) if is_fast else (1e-3, 0.005)

    def make(chosen: DrafterRecipe, target: ModelConfig) -> DrafterRecipe:
        return replace(
            chosen,
            recipe=recipe,
            layers=default_layers(target.num_layers) if recipe == "eagle3" else (),
            unroll_steps=UNROLL_STEPS[recipe],
            learning_rate=rates[0],
            matrix_rate=None if adamw else rates[1],
            fit_tokens=0,
        )

    return make


_RECIPES: Mapping[str, tuple[str, Callable[[DrafterRecipe, ModelConfig], DrafterRecipe]]] = (
    MappingProxyType(
        {
            "recipe": ("EAGLE-1, closed-form start (the default)", lambda chosen, _: chosen),
            "steps": (
                f"the same on {_STEPS_AFTER:,} tokens, then gradient steps",
                lambda chosen, _: replace(chosen, fit_tokens=_STEPS_AFTER),
            ),
            "eagle1": ("EAGLE-1, random, Muon 0.03", _random("eagle1", is_fast=True)),
            "eagle1-adamw": (
                "EAGLE-1, random, AdamW 1e-3",
                _random("eagle1", is_fast=False, adamw=True),
            ),
            "eagle3": ("EAGLE-3, random, Muon 0.03", _random("eagle3", is_fast=True)),
            "eagle3-slow": ("EAGLE-3, random, Muon 0.005", _random("eagle3", is_fast=False)),
        }
    )
)
"""Description of each recipe, and its difference from the chosen one."""
