"""The arms of `longtail bench e2e`: one configuration each, which differ in how they draft.

    off        plain decoding
    history    suffixes of earlier texts, no weights (TLT-Base)
    frozen     the drafter as trained before the run
    spot       the same drafter, trained by idle workers
    cold       a fresh drafter and history, trained by idle workers: `auto` where none was trained

All arms have the same seeds, so they write the same texts and learn the same: only times differ.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from longtail.assembly import drafters
from longtail.assembly.precision import decided
from longtail.bench.options import E2eBenchOptions
from longtail.config import files as configfile
from longtail.config import rl as config
from longtail.errors import ConfigError

OFF, HISTORY, FROZEN, SPOT, COLD = "off", "history", "frozen", "spot", "cold"
_WORDS: Mapping[str, tuple[str, ...]] = {
    OFF: ("--speculation.drafter=none", "--spot.train=never"),
    HISTORY: ("--speculation.drafter=history", "--spot.train=never"),
    FROZEN: ("--spot.train=never",),
    SPOT: ("--spot.train=spot",),
    COLD: (f"--speculation.drafter={drafters.FRESH}+{drafters.HISTORY}", "--spot.train=spot"),
}
"""Configuration of each arm, on top of the run's."""
_TRAINED = (FROZEN, SPOT)
"""Arms that begin with a drafter trained before the run."""
_UNTRAINED = {drafters.NONE, drafters.AUTO, drafters.HISTORY, drafters.FRESH}
_RUN_WORDS = ("--run.save_rollouts=true", "--run.writers=")
"""Logs that the figures need; nothing is sent to the user's own trackers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A configuration for each arm."""

    arms: Mapping[str, config.RunConfig]
    steps: int
    notes: tuple[str, ...]
    """Sentences for the card: which arms are left out, and why."""


def make_plan(options: E2eBenchOptions, place: Path) -> Plan:
    """Return the arms of a run. Raises ConfigError if fewer than two can be measured."""
    path = configfile.locate(options.run)
    given = [f"--speculation.drafter={options.drafter}"] if options.drafter else []
    words = (*options.overrides, *_RUN_WORDS, *given)
    own = config.load(path, words)
    if own.speculation.tuner == "off":
        raise ConfigError(
            "speculation.tuner = 'off': no arm would draft; leave it out, or set 'budget'"
        )
    names, notes = options.arms, tuple[str, ...]()
    missing = [name for name in names if name in _TRAINED]
    if missing and not _has_trained_drafter(own):
        names = tuple(name for name in names if name not in missing)
        notes = (
            f"left out: {', '.join(missing)}: they begin with a trained drafter, and "
            f"speculation.drafter = {own.speculation.drafter!r} is none for {own.model.path}; "
            "train one with `longtail drafter train`, then give --drafter DIR",
        )
    if len(names) < 2:
        raise ConfigError("; ".join((f"--arms = {','.join(options.arms)}", *notes)))
    return Plan(
        arms={
            name: decided(config.load(path, [*words, *_WORDS[name], f"--run.dir={place / name}"]))
            for name in names
        },
        steps=min(options.steps, own.run.steps),
        notes=notes,
    )


def _has_trained_drafter(own: config.RunConfig) -> bool:
    """Return whether a run begins with a trained drafter; ConfigError for one that is nowhere."""
    name = own.speculation.drafter
    drafters.check_names(name)
    if name == drafters.AUTO:
        return drafters.own_of_run(own.model.path) is not None
    return Path(name).is_dir() or not set(name.split("+")) <= _UNTRAINED
