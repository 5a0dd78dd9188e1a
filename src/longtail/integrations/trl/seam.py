"""The rollouts as TRL's side uses them: the generation class and the trainer's callback."""

import abc
from pathlib import Path
from typing import Any

from longtail.integrations.trl.session import Session
from longtail.integrations.trl.turns import Tokens
from longtail.types import Completion, SamplingParams


class TrainerSide(abc.ABC):
    """Rollouts for one trainer."""

    @property
    @abc.abstractmethod
    def session(self) -> Session:
        """The engine and its drafters, from the trainer's construction on."""

    @abc.abstractmethod
    def follow(self, args: Any, state: Any) -> None:
        """Take the trainer's arguments and the state that it updates."""

    @abc.abstractmethod
    def open(self, settings: Any) -> Session:
        """Open the engine for a `VLLMGeneration`. Raises ConfigError for a second trainer."""

    @abc.abstractmethod
    def generate(
        self, prompts: list[Tokens], params: SamplingParams, *, is_training: bool
    ) -> list[Completion]:
        """Return one completion of each prompt, in their order."""

    @abc.abstractmethod
    def add_metrics(self) -> None:
        """Add the metrics of the last rollouts to the trainer's own."""

    @abc.abstractmethod
    def save(self, checkpoint: Path) -> None:
        """Write the drafter into a checkpoint of the trainer, as its folder `longtail`."""
