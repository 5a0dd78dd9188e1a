"""The arms of `longtail bench e2e`: one configuration each, which differ in how they draft.

    off        plain decoding
    history    suffixes of earlier texts, no weights (TLT-Base)
    frozen     the drafter as trained before the run
    serial     trained after each rollout while all workers wait; its time counts
    spot       trained by workers that have finished, while the others still write
    cold       the same, from a fresh drafter beside history: what `auto` is where none was trained
    unplaced   as spot, but repeated prompts are placed as if their lengths were unknown

All arms have the same seeds, so they write the same texts and learn the same: only times differ.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from longtail.assembly import drafters
from longtail.assembly.models import TINY_REASONER, model_directory
from longtail.assembly.precision import decided
from longtail.bench.common.grown import LARGE, grow_drafter, grow_target
from longtail.bench.e2e.arms import COLD, FROZEN, HISTORY, OFF, SERIAL, SPOT, UNPLACED
from longtail.bench.e2e.options import E2eBenchOptions
from longtail.bench.e2e.task import write_prompts
from longtail.config import files as configfile
from longtail.config import rl as config
from longtail.drafter.formats.checkpoint import identity, load_drafter, save_drafter
from longtail.errors import ConfigError
from longtail.model.hf.model import load_model, save_model
from longtail.model.hf.tokenizer import load_tokenizer
from longtail.system.device import threads_each
from longtail.tiny import DRAFTERS

_WORDS: Mapping[str, tuple[str, ...]] = {
    OFF: ("--speculation.drafter=none", "--spot.train=never"),
    HISTORY: ("--speculation.drafter=history", "--spot.train=never"),
    FROZEN: ("--spot.train=never",),
    SERIAL: ("--spot.train=serial",),
    SPOT: ("--spot.train=spot",),
    COLD: (f"--speculation.drafter={drafters.FRESH}+{drafters.HISTORY}", "--spot.train=spot"),
    UNPLACED: ("--spot.train=spot",),
}
"""Configuration of each arm, on top of the common one."""
TRAINED = (FROZEN, SERIAL, SPOT, UNPLACED)
"""Arms that begin with a drafter trained before the run."""
_RUN_WORDS = ("--run.save_rollouts=true", "--run.writers=", "--run.speculation_mb=0")
"""Logs that the figures need; nothing is sent to the user's own trackers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Model, workers and steps, the same for all arms.

    Example: Setting(model="tiny", workers=2, threads=1, steps=20)
    """

    model: str
    workers: int
    threads: int
    """Compute threads of each worker."""
    steps: int
    """Training steps of each arm."""
    switch_step: int | None = None
    """First step on differently worded prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A configuration for each arm."""

    arms: Mapping[str, config.RunConfig]
    setting: Setting
    times_saves: bool
    """Whether checkpoints of the drafter are timed at the end."""
    notes: tuple[str, ...] = ()
    """Sentences for the card: which arms are left out, and why."""


def make_plan(options: E2eBenchOptions, place: Path, overrides: Sequence[str] = ()) -> Plan:
    """Return the arms of RUN, or of the tiny reasoner; `overrides` add to all configurations."""
    if options.run is None:
        return _tiny_plan(options, place, overrides)
    return _run_plan(options, configfile.locate(options.run), place)


def _run_plan(options: E2eBenchOptions, path: Path, place: Path) -> Plan:
    """Return the arms of a configuration. Raises ConfigError if fewer than two can be measured."""
    given = [f"--speculation.drafter={options.drafter}"] if options.drafter else []
    words = (*options.overrides, *_RUN_WORDS, *given)
    own = config.load(path, words)
    if own.speculation.tuner == "off":
        raise ConfigError(
            "speculation.tuner = 'off': no arm would draft; leave it out, or set 'budget'"
        )
    names, notes = options.arm_names, tuple[str, ...]()
    if (reason := _no_trained_drafter(own)) and (missing := [n for n in names if n in TRAINED]):
        notes = (f"left out: {', '.join(missing)}: {reason}",)
        names = tuple(name for name in names if name not in missing)
    if len(names) < 2:
        raise ConfigError("; ".join((f"--arms = {','.join(options.arm_names)}", *notes)))

    return Plan(
        arms=_configurations(path, names, words, place),
        setting=Setting(
            model=own.model.path,
            workers=own.cluster.workers,
            threads=threads_each(own.run.threads, own.cluster.workers),
            steps=min(options.steps, own.run.steps),
        ),
        times_saves=False,
        notes=notes,
    )


def _configurations(
    path: Path, names: Sequence[str], words: Sequence[str], place: Path
) -> dict[str, config.RunConfig]:
    """Return the configuration of each arm, with a run directory of its own."""
    return {
        name: decided(config.load(path, [*words, *_WORDS[name], f"--run.dir={place / name}"]))
        for name in names
    }


def _no_trained_drafter(own: config.RunConfig) -> str | None:
    """Return why a configuration has no drafter that was trained before; None if it has one."""
    name, model = own.speculation.drafter, own.model.path
    if name == drafters.AUTO and (model == TINY_REASONER or drafters.own_of_run(model)):
        return None
    untrained = (drafters.NONE, drafters.AUTO, drafters.HISTORY, drafters.FRESH)
    names = [name] if Path(name).is_dir() else name.split("+")
    trained = [each for each in names if each not in untrained]
    for each in trained:
        if not each.startswith(TINY_REASONER) and not Path(each).is_dir():
            raise ConfigError(
                f"speculation.drafter = {each!r}: no such directory; give a drafter directory, "
                "or a run that trained one"
            )
    if trained:
        return None
    return (
        f"they begin with a trained drafter, and speculation.drafter = {name!r} is none for "
        f"{model}; train one with `longtail drafter train`, then give --drafter DIR"
    )


def _tiny_plan(options: E2eBenchOptions, place: Path, overrides: Sequence[str]) -> Plan:
    """Return the arms of the configuration `tiny`."""
    small = model_directory(TINY_REASONER)
    words: tuple[str, ...] = (*options.tiny_words, *overrides)
    if options.drafter:
        words = (f"--speculation.drafter={options.drafter}", *words)
    if options.model != "tiny":
        model, drafter = grow(small, place)
        words = (f"--model.path={model}", f"--speculation.drafter={drafter}", *words)
    if options.switch_task is not None:
        words = (f"--data.source={write_prompts(place, options)}", *words)

    return Plan(
        arms=_configurations(configfile.locate("tiny"), options.arm_names, words, place),
        setting=Setting(
            model=options.model,
            workers=options.workers,
            threads=1,
            steps=options.steps,
            switch_step=options.switch_task,
        ),
        times_saves=True,
    )


def grow(small: Path, place: Path) -> tuple[Path, Path]:
    """Write the tiny reasoner and its drafter, grown to 100M parameters, as directories."""
    tokenizer, model = load_tokenizer(small), load_model(small)
    loaded = load_drafter(DRAFTERS["eagle1"], model, tokenizer, strict_weights=False)
    target = grow_target(model, LARGE)
    save_model(target, place / "model", eos_ids=tokenizer.eos_ids)
    tokenizer.save(place / "model")
    layer = grow_drafter(loaded.layer, LARGE)
    own = identity(str(place / "model"), target, tokenizer)
    save_drafter(place / "drafter", layer, loaded.draft_ids, own, loaded.training)
    return place / "model", place / "drafter"
