"""TRL beside the arms: its update on the texts of the last steps of `off`.

    off        rollout, then everything else of a step: grading, logprobs, update, publication
    TRL        the loss of its GRPO trainer, backward and AdamW, on the same texts and rewards

TRL gets all threads of the workers together. Its own rollouts are compared by `longtail bench trl`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from operator import itemgetter
from typing import Any

from longtail.assembly.models import model_directory
from longtail.bench.common.peers import PeerProcess
from longtail.bench.common.timing import Spread, ratios
from longtail.bench.e2e.arms import ArmResult
from longtail.bench.training.step import StepBatch, open_trainer, step_seconds
from longtail.config.rl import RunConfig
from longtail.model.hf.tokenizer import Tokenizer, load_tokenizer
from longtail.rl.advantage import dr_grpo
from longtail.run.console import Console
from longtail.system.device import threads_each

_STEPS = 3
"""Most steps that are compared, the last ones; the one before warms up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """Seconds outside of rollouts, step by step, and the peer's description."""

    ours: Sequence[float]
    trl: Sequence[float]
    description: str

    @property
    def ratio(self) -> Spread:
        """TRL's seconds over ours."""
        return ratios(self.trl, self.ours)

    def sentence(self) -> str:
        """Return the comparison for the card."""
        return (
            f"{self.description}: on the texts of the last steps, everything but the rollout takes "
            f"{self.ratio.text(2)} times as long as in longtail."
        )


def open_trl(python: str, config: RunConfig) -> PeerProcess:
    """Start TRL on the model of the arms, with the threads of all workers.

    Raises ConfigError if `python` cannot be started or cannot import TRL.
    """
    workers = config.cluster.workers
    threads = threads_each(config.run.threads, workers) * workers
    return open_trainer(python, "trl", model_directory(config.model.path), threads)


def measure(python: str, config: RunConfig, off: ArmResult) -> Beside:
    """Make TRL's update for the last steps of `off`."""
    tokenizer = load_tokenizer(model_directory(config.model.path))
    steps = list(enumerate(off.metrics, start=1))[-_STEPS - 1 :]
    console = Console("bench e2e: TRL: ")
    seconds: list[float] = []
    with (
        console.phase("updates on the texts of off", total=len(steps)),
        open_trl(python, config) as peer,
    ):
        for count, (step, _) in enumerate(steps):
            console.count(count)
            own = [each for each in off.rollouts if each["step"] == step]
            seconds.append(step_seconds(peer.ask(turn(own, tokenizer))))
        description = peer.description
    ours = [row["timing_s/step"] - row["timing_s/rollout"] for _, row in steps]
    kept = slice(len(steps) > 1, None)
    return Beside(ours=ours[kept], trl=seconds[kept], description=description)


def turn(rollouts: Sequence[Mapping[str, Any]], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the job for TRL: texts, group after group, with advantages within each group."""
    groups = groupby(rollouts, key=itemgetter("prompt_id"))
    rewards = [[each["reward"] for each in own] for _, own in groups]
    prompts = [tokenizer.encode(each["prompt"]) for each in rollouts]
    endings = [tokenizer.encode(each["text"]) or (0,) for each in rollouts]
    return StepBatch(
        texts=[(*a, *b) for a, b in zip(prompts, endings, strict=True)],
        prompt_lens=[len(each) for each in prompts],
        advantages=list(chain.from_iterable(dr_grpo(rewards))),
    ).trl_turn()
