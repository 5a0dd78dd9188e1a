"""The drafter of a run on disk: what it has learned survives, and nobody waits for the disk.

    runs/example/drafter/
      initial/                  the drafter that the run began with: a drafter directory
      step_000010/
        tensors.safetensors     the drafter's own weights, and the texts it learns from
        state.json              version and cursors; the seal of the file above
      .new-step_000020/         being written

Weights that were published are never modified, so a background thread writes them while the run
goes on: selective (nothing of the target, no optimizer moments) and asynchronous, as in TLT (arXiv
2511.16665). One write at a time; the next waits for the last. A resumed run takes the newest one
that is whole and not younger than its checkpoint; without one it begins with the drafter it was
given, and only the clock can tell. `load_run_drafter` makes one drafter of all this, for whoever
comes later: what the first one says, with the newest weights.
"""

import logging
import re
import shutil
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import torch

from longtail.cluster.group import DrafterState
from longtail.drafter.eagle.weights import load_parameters
from longtail.drafter.formats.checkpoint import LoadedDrafter, is_drafter, load_drafter
from longtail.errors import CheckpointError, ConfigError
from longtail.model.hf.tokenizer import Tokenizer
from longtail.model.transformer import Transformer
from longtail.run.checkpoint import UNWRITABLE, load_tensors, save_tensors, steps_in
from longtail.system.files import open_sealed, seal_folder

_log = logging.getLogger("longtail")
_NAME = re.compile(r"step_(\d{6,})")
_TENSORS, _STATE = "tensors.safetensors", "state.json"
INITIAL = "initial"


@final
class DrafterStore:
    """Writes in a thread of its own; `close` waits for it."""

    def __init__(self, directory: Path, *, keep: int = 2) -> None:
        self._directory, self._keep = directory, keep
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def save(self, step: int, state: DrafterState) -> float:
        """Begin to write; return the seconds that the caller was kept.

        Raises CheckpointError if the write before failed.
        """
        began = time.perf_counter()
        self.wait()
        self._thread = threading.Thread(target=self._write, args=(step, state), daemon=True)
        self._thread.start()
        return time.perf_counter() - began

    def wait(self) -> None:
        """Wait for the write in progress. Raises CheckpointError if it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise CheckpointError(
                f"the drafter cannot be written to {self._directory}: {error}; free some space, "
                "then start again: the run resumes from its newest checkpoint"
            ) from error

    def load(self, step: int) -> DrafterState | None:
        """Read the newest that is whole, of this step or an earlier one; None if there is none."""
        for found, path in reversed(steps_in(self._directory)):
            if found <= step:
                try:
                    return _read(path)
                except (OSError, ValueError, KeyError) as error:
                    _log.warning("%s is damaged (%s); an older one is taken", path, error)
        return None

    def _write(self, step: int, state: DrafterState) -> None:
        place = self._directory / f"step_{step:06d}"
        temporary = self._directory / f".new-{place.name}"
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            save_tensors(state.tensors, temporary / _TENSORS)
            seal_folder(temporary, _STATE, {"numbers": dict(state.numbers)})
            shutil.rmtree(place, ignore_errors=True)
            temporary.rename(place)
            for _, old in steps_in(self._directory)[: -self._keep]:
                shutil.rmtree(old, ignore_errors=True)
        except UNWRITABLE as error:
            self._error = error


def run_drafters(path: Path) -> Path | None:
    """Return where the drafters of a run lie: of its directory, or of one of its drafter steps."""
    for found in (path / "drafter", path, path.parent):
        if is_drafter(found / INITIAL):
            return found
    return None


def load_run_drafter(
    path: Path, target: Transformer, tokenizer: Tokenizer, *, dtype: torch.dtype | None
) -> LoadedDrafter:
    """Read the newest drafter of a run, or the one of a step that `path` names.

    Raises ConfigError where the target is another, or the run's weights are another drafter's.
    """
    place = run_drafters(path)
    assert place is not None, "a run with a drafter"
    match = _NAME.fullmatch(path.name)
    loaded = load_drafter(place / INITIAL, target, tokenizer, strict_weights=False, dtype=dtype)
    kept = None
    if path.name != INITIAL:
        kept = DrafterStore(place).load(int(match[1]) if match else sys.maxsize)
    if kept is None or not kept.numbers["version"]:
        return loaded
    try:
        load_parameters(loaded.layer, kept.drafter())
    except CheckpointError as error:
        raise ConfigError(
            f"{place}: {error}; give {place / INITIAL}, the drafter that the run began with"
        ) from error
    return _trained_in(place.parent.name, kept.numbers, loaded)


def _trained_in(run: str, numbers: Mapping[str, Any], loaded: LoadedDrafter) -> LoadedDrafter:
    """Say what became of a drafter in a run; how it did before is true no more."""
    name = f"{loaded.trained_on.name}, then the policy of {run} (version {numbers['version']})"
    return replace(
        loaded,
        trained_on=replace(loaded.trained_on, name=name),
        training=replace(
            loaded.training, agreement=(), overlap=(), accept_len=numbers.get("accept_len")
        ),
    )


def _read(path: Path) -> DrafterState:
    document = open_sealed(path, _STATE)
    return DrafterState(tensors=load_tensors(path / _TENSORS), numbers=document["numbers"])
