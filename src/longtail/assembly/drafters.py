"""Construction of drafters, and of speculation with them, from their names.

auto               the drafter of the run that the target is from, or in training fresh; and
                   history+phrases
fresh              a new ridge drafter of the target's shape, which learns during the run
history            suffixes of the request's own text and of others of its prompt, no weights
phrases            suffixes of all completions, no weights
module:Class       a drafter of yours, no weights
a directory        a drafter of `longtail drafter train` or its run, the newest of a run of
                   `longtail train`, or a published one in the layout of vLLM
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from longtail.config.rl import SpeculationSection, SpotSection
from longtail.drafter.eagle.fresh import commonest_tokens
from longtail.drafter.eagle.target_states import training_taps
from longtail.drafter.formats import checkpoint
from longtail.drafter.formats.checkpoint import LoadedDrafter, TrainingRecord, identity
from longtail.drafter.formats.eagle_import import is_published, load_published
from longtail.drafter.history import HistoryDrafter, PhraseDrafter
from longtail.drafter.ridge.layer import RidgeConfig, RidgeLayer
from longtail.engine.speculation.feature_store import FeatureStore
from longtail.engine.speculation.speculator import Speculation
from longtail.errors import ConfigError, describe, did_you_mean
from longtail.model.hf.tokenizer import Tokenizer
from longtail.model.transformer import Transformer
from longtail.run.drafter_store import drafter_directory, load_run_drafter, own_of_run, run_drafters
from longtail.speculation.drafter import Drafter
from longtail.speculation.strategy import Strategy
from longtail.speculation.tree import DraftTree, prune
from longtail.system.files import similar_folders
from longtail.system.machine import is_path, module_hint, named_callable
from longtail.tuner.budget_tuner import BudgetTuner
from longtail.tuner.tuner import FixedTuner, OffTuner, Tuner

_FRESH_VOCAB = 64
"""Tokens that a fresh drafter can propose; those that are written replace them."""
_BY_BUDGET, _NEVER = SpeculationSection(), SpotSection(train="never")
HISTORY, PHRASES, FRESH = "history", "phrases", "fresh"
NONE, AUTO = "none", "auto"
WEIGHTLESS: Mapping[str, Callable[[], Drafter]] = MappingProxyType(
    {HISTORY: HistoryDrafter, PHRASES: PhraseDrafter}
)
"""Drafters without weights, which begin to draft with the first texts."""
_CALLS = ("propose", "observe", "learn", "forget", "refresh")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The model that is drafted for, as rollouts hold it."""

    model: Transformer
    tokenizer: Tokenizer
    directory: Path
    name: str
    """Name of the model in the configuration."""


def open_speculation(
    names: Sequence[str],
    target: Target,
    own: SpeculationSection = _BY_BUDGET,
    spot: SpotSection = _NEVER,
) -> Speculation | None:
    """Return speculation with the drafters of these single names; None without any.

    It keeps what the first drafter with weights learns from, unless `spot` lets none learn. Raises
    ConfigError like `open_drafter`.
    """
    drafters = tuple(open_drafter(name, target) for name in names)
    if not drafters:
        return None
    tuner = make_tuner(own, BudgetTuner)
    made = Speculation(drafters=drafters, tuner=tuner, coupled=own.coupled)
    if spot.train == "never" or (learner := made.learner) is None:
        return made
    if (statistics := learner.statistics()) is not None:
        return replace(made, statistics=statistics)
    if not spot.features_mb:
        return made
    store = FeatureStore(training_taps(learner.taps), spot.features_mb * 2**20)
    return replace(made, features=store)


def make_tuner(own: SpeculationSection, by_cost: Callable[[], Tuner]) -> Tuner:
    """Return the tuner of a run; `by_cost` makes that of `budget`."""
    fixed = Strategy(depth=own.depth, width=own.width, size=own.size)
    if own.tuner != "fixed":
        return OffTuner() if own.tuner == "off" else by_cost()
    return FixedTuner(fixed, max_running=own.max_running)


def open_drafter(name: str, target: Target) -> Drafter:
    """Return the drafter `name`; ConfigError if it does not fit the target."""
    if (loaded := read_drafter(name, target, target.model.dtype)) is not None:
        return loaded.drafter(target.model)
    made = weightless(name)
    if is_path(name):
        _check_calls(made, f"speculation.drafter = {name!r}", target.model.config.vocab_size)
    return made


def read_drafter(
    name: str, target: Target, dtype: torch.dtype | None, *, field: str = "speculation.drafter"
) -> LoadedDrafter | None:
    """Read a drafter of any layout, in `dtype` or its stored type; None for one without weights.

    Raises ConfigError, which names the setting `field`, for other names.
    """
    model, tokenizer, home = target.model, target.tokenizer, located(name, field=field)[1]
    if name == FRESH:
        return fresh(target, dtype or torch.float32)
    if home is None:
        return None
    if run_drafters(Path(name)) is not None:
        return load_run_drafter(Path(name), model, tokenizer, dtype=dtype)
    if is_published(home):
        return load_published(home, target.name, model, tokenizer, dtype=dtype)
    return checkpoint.load_drafter(home, model, tokenizer, strict_weights=False, dtype=dtype)


def open_trainable(names: Sequence[str], target: Target) -> LoadedDrafter | None:
    """Read the first drafter that has weights, in float32; None if none has."""
    found = (read_drafter(name, target, torch.float32) for name in names)
    return next((each for each in found if each is not None), None)


def fresh(target: Target, dtype: torch.dtype = torch.float32) -> LoadedDrafter:
    """Return a drafter that begins to learn, for this target."""
    model, tokenizer = target.model, target.tokenizer
    ids = commonest_tokens((), min(_FRESH_VOCAB, model.config.vocab_size), tokenizer.eos_ids)
    layer = RidgeLayer(RidgeConfig(target=model.config, draft_vocab_size=len(ids)))
    return LoadedDrafter(
        layer=layer.to(dtype),
        draft_ids=ids.to(model.device),
        trained_on=identity(target.name, model, tokenizer),
        training=TrainingRecord(steps=0, tokens=0, unroll_steps=1),
    )


def drafter_names(names: str, model: str, *, learns: bool) -> list[str]:
    """Return the single names in `names`: one, several joined by +, `auto`, or `none`.

    `model` is the target's name. `learns`: a drafter is trained while it is used, so that it may
    begin fresh.
    """
    if names == NONE:
        return []
    if names == AUTO:
        first = own_of_run(model) or (FRESH if learns else None)
        return [*([first] if first else []), *WEIGHTLESS]
    parts = _split(names)
    if not all(parts):
        raise ConfigError(
            f"speculation.drafter = {names!r}: a name is missing next to +; write DIR+{HISTORY}"
        )
    if FRESH in parts and not learns:
        raise ConfigError(
            f"speculation.drafter = {names!r}: a fresh drafter has to learn while it is used, as "
            f"`longtail train` does with spot.train = 'spot'; give {HISTORY} or a trained one"
        )
    return parts


def check_names(names: str, *, field: str = "speculation.drafter") -> None:
    """Raise ConfigError, before a model is opened, if a name is neither known nor a drafter."""
    for name in () if names in (NONE, AUTO) else filter(None, _split(names)):
        if located(name, field=field)[1] is None and name != FRESH:
            weightless(name, field=field)


def weightless(name: str, *, field: str = "speculation.drafter") -> Drafter:
    """Make a drafter without weights. Raises ConfigError for a class that is none."""
    make = WEIGHTLESS.get(name) or named_callable(name, field)
    try:
        if not (isinstance(make, type) and issubclass(make, Drafter)):
            raise ConfigError(f"it is a {type(make).__name__}; expected a subclass of Drafter")
        made = make()
        made.curve.table()
        for method in _CALLS:
            given = inspect.signature(getattr(made, method))
            expected = [*inspect.signature(getattr(Drafter, method)).parameters][1:]
            try:
                given.bind(*expected)
            except TypeError as error:
                raise ConfigError(f"{method}{given} must take ({', '.join(expected)})") from error
    except Exception as error:
        raise ConfigError(f"{field} = {name!r}: {describe(error)}") from error
    return made


def _check_calls(drafter: Drafter, source: str, vocab_size: int) -> None:
    """Give a drafter's calls copies of lists, and let what fails raise ConfigError of `source`."""

    def call(method: Callable[..., Any], name: str, *given: Any) -> Any:
        if name in ("propose", "observe"):
            given = ([replace(each, tokens=list(each.tokens)) for each in given[0]], *given[1:])
        try:
            found = method(*given)
        except (Exception, SystemExit) as error:
            raise ConfigError(f"{source}: {name} raised {describe(error)}") from error
        if name == "propose":
            if problem := _problem(found, len(given[0]), vocab_size):
                raise ConfigError(f"{source}: propose returned {problem}")
            return [prune(tree, given[1].num_nodes) for tree in found]

    for name in _CALLS:
        setattr(drafter, name, partial(call, getattr(drafter, name), name))


def _problem(trees: Any, count: int, vocab_size: int) -> str:
    """Return what is proposed for a number of requests, if it cannot be; else ""."""
    if not isinstance(trees, list) or not all(isinstance(tree, DraftTree) for tree in trees):
        return f"{trees!r:.60}; expected a list with a DraftTree for each request"
    if len(trees) != count:
        return f"{len(trees)} tree{'' if len(trees) == 1 else 's'} for {count} requests"
    for tree in trees:
        columns = (tree.tokens, tree.parents, tree.margins, tree.reach or tree.margins)
        if not all(isinstance(each, tuple) and len(each) == tree.size for each in columns):
            return f"{tree!r:.90}; expected tuples of one length"
        for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
            if type(token) is not int or not 0 <= token < vocab_size:
                return f"token {token!r} of a vocabulary of {vocab_size}"
            if type(parent) is not int or not 0 <= parent <= node:
                return f"parent {parent!r} of node {node + 1}; it must come first"
    return ""


def _split(names: str) -> list[str]:
    """Return the names joined by +; the path of a directory may have one in it."""
    return [names] if Path(names).is_dir() else names.split("+")


def located(name: str, *, field: str = "speculation.drafter") -> tuple[str, Path | None]:
    """Return a single name, a path as an absolute one, and the directory of all its files, if any.

    Raises ConfigError like `check_names`.
    """
    path = Path(name).absolute()
    if name in (FRESH, *WEIGHTLESS) or (is_path(name) and not path.is_dir()):
        return name, None
    if not path.is_dir():
        known = [*WEIGHTLESS, FRESH, NONE, AUTO, *similar_folders(name)]
        raise ConfigError(
            f"{field} = {name!r}: it is neither {', '.join(WEIGHTLESS)}, {FRESH}, module:Class "
            f"nor a directory{did_you_mean(name, known)}{module_hint(name)}; train one with "
            "`longtail drafter train`"
        )
    home = run_drafters(path) or (path if is_published(path) else drafter_directory(path))
    return str(path if path.is_relative_to(home) else home), home
