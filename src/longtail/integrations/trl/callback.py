"""The trainer's events that the rollouts need."""

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from longtail.integrations.trl.seam import TrainerSide


class RolloutsCallback(TrainerCallback):
    """Gives the rollouts the trainer's state, and saves the drafter beside the model."""

    def __init__(self, rollouts: TrainerSide) -> None:
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
