"""State of a run between two steps: saved to checkpoints and restored from them."""

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

from longtail.cluster.group import WorkerGroup
from longtail.errors import CheckpointError
from longtail.rl.data.prompts import PromptSource
from longtail.rl.learner import LearnerState
from longtail.run.checkpoint import Checkpoint, RunDirectory
from longtail.run.drafter_store import INITIAL, DrafterStore

_log = logging.getLogger("longtail")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """Progress of a run; with the learner's state, all that a resume needs."""

    step: int
    """Number of completed steps."""
    cursor: Mapping[str, Any]
    """Position of the prompt source."""
    seconds: float
    """Wall time of the run up to its last start."""
    threads: int
    """Threads of a worker; the bits of an update depend on them."""
    base: Mapping[str, str] | None = None
    """Model that adapters or the KL divergence refer to, as `run.base_model` records it."""


@final
class StateSaver:
    """Saves and restores the policy, the learner, the prompt source and the drafter of a run."""

    def __init__(
        self,
        run: RunDirectory,
        workers: WorkerGroup,
        source: PromptSource,
        *,
        keep: int,
    ) -> None:
        self._run, self._workers, self._source = run, workers, source
        self._drafters = DrafterStore(run.path / "drafter", keep=keep + 1)
        self._saved_step = 0

    def begin(self, checkpoint: Checkpoint | None, fresh: TrainerState) -> TrainerState:
        """Restore a checkpoint, or begin with a fresh state; return the state, as it was saved."""
        if checkpoint is None:
            return fresh
        saved = dict(checkpoint.state)
        learner = LearnerState(tensors=checkpoint.tensors(), numbers=saved.pop("learner"))
        self._workers.restore(checkpoint.policy, learner)
        self._source.restore(saved["cursor"])
        self._saved_step = checkpoint.step
        return TrainerState(step=checkpoint.step, **saved)

    def begin_writing(self) -> None:
        """Write configuration and configured drafter, as nothing prevents the run any more.

        Then restore the checkpoint's drafter, if it is whole and of this configuration.
        """
        self._run.write_config()
        if self._workers.drafter is None:
            return
        self._workers.save_drafter(self._run.path / "drafter" / INITIAL)
        if not self._saved_step or (kept := self._drafters.load(self._saved_step)) is None:
            return
        try:
            self._workers.restore_drafter(kept)
        except CheckpointError as error:
            _log.warning(
                "%s: %s; the run goes on with its first drafter, which changes only the speed",
                self._run.path / "drafter",
                error,
            )

    def save(self, state: TrainerState) -> None:
        """Write a checkpoint unless the newest one is of this step."""
        if state.step == self._saved_step:
            return
        if (drafter := self._workers.drafter_state()) is not None:
            self._drafters.save(state.step, drafter)  # a checkpoint is there with its drafter
        else:
            self._workers.save_drafter(self._run.path / "drafter" / INITIAL)
        learner = self._workers.learner_state()
        document = {**asdict(state), "learner": dict(learner.numbers)}
        del document["step"]  # the checkpoint's own
        self._run.save(state.step, self._workers.save_policy, learner.tensors, document)
        self._saved_step = state.step

    def newest_policy(self) -> Path | None:
        """Return the policy of the newest checkpoint; None without a checkpoint."""
        path = self._run.checkpoints / f"step_{self._saved_step:06d}" / "policy"
        return path if self._saved_step else None
