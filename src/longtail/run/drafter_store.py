"""Checkpoints of a run's drafter.

    runs/example/drafter/
      initial/                  drafter directory of the drafter at the start of the run
      step_000010/
        tensors.safetensors     the drafter's own weights, and the sums that they follow from
        state.json              version and cursors, and digests of both files
      .new-step_000020/         being written

A step's drafter is written before its checkpoint: its own weights, without optimizer moments, as
in TLT (arXiv 2511.16665). A resumed run loads the newest drafter that is whole and not newer than
its checkpoint, else it starts with its configured drafter, which changes only the speed.
`load_run_drafter` combines the newest weights with the description of the initial drafter.
"""

import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import final

import torch

from longtail.cluster.work.drafter_versions import DrafterState
from longtail.drafter.formats.checkpoint import DESCRIPTION, LoadedDrafter, is_drafter, load_drafter
from longtail.errors import SPACE, CheckpointError, ConfigError
from longtail.model.hf.tokenizer import Tokenizer
from longtail.model.transformer import Transformer
from longtail.run.checkpoint import load_tensors, policy_with, put_step, step_of, steps_in
from longtail.run.state_file import read_state, write_state
from longtail.system import tensor_files
from longtail.system.files import writing

_log = logging.getLogger("longtail")

_TENSORS = "tensors.safetensors"
INITIAL = "initial"


@final
class DrafterStore:
    """Drafter checkpoints of a run."""

    def __init__(self, directory: Path, *, keep: int = 2) -> None:
        self._directory, self._keep = directory, keep

    def save(self, step: int, state: DrafterState) -> None:
        """Write a drafter. Raises CheckpointError if that fails."""

        def write(folder: Path) -> None:
            tensor_files.save(state.tensors, folder / _TENSORS)
            write_state(folder, {"numbers": dict(state.numbers)})

        with writing("the drafter", self._directory, SPACE):
            put_step(self._directory, step, write, keep=self._keep)

    def load(self, step: int) -> DrafterState | None:
        """Return the newest whole drafter of this step or an earlier one, None without one.

        A line says which are damaged.
        """
        found = [path for number, path in steps_in(self._directory) if number <= step]
        for path in reversed(found):
            try:
                return read_drafter_state(path)
            except CheckpointError as error:
                _log.warning("%s; an earlier drafter is taken, which changes only the speed", error)
        return None


def read_drafter_state(path: Path) -> DrafterState:
    """Read the drafter of one step. Raises CheckpointError if it is damaged."""
    numbers = read_state(path, section="numbers")["numbers"]
    return DrafterState(tensors=load_tensors(path / _TENSORS), numbers=numbers)


def run_drafters(path: Path) -> Path | None:
    """Return the drafter folder of a run, given the run's directory or a step in that folder."""
    for found in (path / "drafter", path, path.parent):
        if is_drafter(found / INITIAL):
            return found
    return None


def own_of_run(model: str) -> str | None:
    """Return the run that a model is from, if the run has a drafter."""
    path = Path(model)
    run = path.parent.parent if path.parent.name == "checkpoints" else path
    return None if run_drafters(run) is None else str(run)


def drafter_directory(path: Path) -> Path:
    """Return the drafter directory at a path, in a checkpoint, or in a run's newest one."""
    if (found := policy_with(DESCRIPTION, path)) is not None:
        return found
    reason = "neither a drafter nor a run with one" if path.exists() else "no such directory"
    raise ConfigError(
        f"{path}: {reason}; give a drafter directory (with drafter.json), a checkpoint, or a run "
        "directory of longtail drafter train"
    )


def load_run_drafter(
    path: Path, target: Transformer, tokenizer: Tokenizer, *, dtype: torch.dtype | None
) -> LoadedDrafter:
    """Read the newest drafter of a run, or that of the step at `path`.

    What the run taught it is recorded in place of earlier measurements. Raises ConfigError if the
    target differs, or if the weights do not fit the initial drafter; CheckpointError if the step
    that was named is damaged.
    """
    place = run_drafters(path)
    assert place is not None, "a run with a drafter"
    loaded = load_drafter(place / INITIAL, target, tokenizer, strict_weights=False, dtype=dtype)
    kept = None
    if path.name != INITIAL:
        is_step = step_of(path) is not None
        kept = read_drafter_state(path) if is_step else DrafterStore(place).load(sys.maxsize)
    if kept is None or not kept.numbers["version"]:
        return loaded
    try:
        trained = kept.put_into(loaded)
    except CheckpointError as error:
        raise ConfigError(
            f"{place}: {error}; give {place / INITIAL}, the drafter that the run began with"
        ) from error
    run, version = place.parent.name, kept.numbers["version"]
    name = f"{loaded.trained_on.name}, then the policy of {run} (version {version})"
    return replace(trained, trained_on=replace(loaded.trained_on, name=name))
