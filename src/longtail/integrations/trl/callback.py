"""The trainer's events that the rollouts need."""

from pathlib import Path
from typing import Any, Protocol

from transformers import TrainerCallback


class FollowsTrainer(Protocol):
    """The rollouts as their callback uses them."""

    def follow(self, args: Any, state: Any) -> None:
        """Take the trainer's arguments and state."""
        ...

    def add_metrics(self) -> None:
        """Add the metrics of the last rollouts to the trainer's own."""
        ...

    def save(self, checkpoint: Path) -> None:
        """Write the drafter into a checkpoint."""
        ...


class RolloutsCallback(TrainerCallback):
    """Gives the rollouts the trainer's state, and saves the drafter beside the model."""

    def __init__(self, rollouts: FollowsTrainer) -> None:
        self._rollouts = rollouts

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Take the arguments, before the trainer builds its generator."""
        self._rollouts.follow(args, state)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Take the state of a training that begins or goes on."""
        self._rollouts.follow(args, state)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Give the trainer the metrics of its rollouts, before it logs the step."""
        self._rollouts.add_metrics()

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write the drafter beside the trainer's checkpoint."""
        if state.is_world_process_zero:
            self._rollouts.save(Path(args.output_dir) / f"checkpoint-{state.global_step}")
