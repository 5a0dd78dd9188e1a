"""TRL beside the arms: its update on the texts of the last steps of `off`.

    off        rollout, then everything else of a step: grading, logprobs, update, publication
    TRL        the loss of its GRPO trainer, backward and AdamW, on the same texts and rewards

TRL gets all threads of the workers together. Its own rollouts are compared by `longtail bench trl`.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longtail.bench.common.peers import PeerProcess
from longtail.bench.common.process import Log
from longtail.bench.common.timing import Spread, ratios
from longtail.bench.e2e.arms import ArmResult
from longtail.build.models import model_directory
from longtail.config.rl import RunConfig
from longtail.model.hf.tokenizer import Tokenizer, load_tokenizer
from longtail.system.device import threads_each

_STEPS = 3
"""Most steps that are compared, the last ones; the one before warms up."""
_ROWS = 8
"""Sequences of a micro-batch, as TRL has them."""
_WORKER = Path(__file__).parent.parent / "training" / "step_worker.py"


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


def measure(python: str, config: RunConfig, off: ArmResult, log: Log) -> Beside:
    """Make TRL's update for the last steps of `off`."""
    directory = model_directory(config.model.path)
    tokenizer, workers = load_tokenizer(directory), config.cluster.workers
    threads = threads_each(config.run.threads, workers) * workers
    steps = list(enumerate(off.metrics, start=1))[-_STEPS - 1 :]
    spec = {"kind": "trl", "model_dir": str(directory), "threads": threads}
    log("loading TRL")
    seconds: list[float] = []
    with PeerProcess(python, _WORKER, "trl", spec, flag="--peer-python") as peer:
        for step, _ in steps:
            own = [each for each in off.rollouts if each["step"] == step]
            answer = peer.ask(turn(own, tokenizer))
            seconds.append(sum(answer[part] for part in ("forward", "backward", "update")))
        description = peer.description
    ours = [row["timing_s/step"] - row["timing_s/rollout"] for _, row in steps]
    kept = slice(len(steps) > 1, None)
    return Beside(ours=ours[kept], trl=seconds[kept], description=description)


def turn(rollouts: Sequence[Mapping[str, Any]], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the job of `training.step_worker`: texts, and advantages within each group."""
    rewards: dict[str, list[float]] = defaultdict(list)
    for each in rollouts:
        rewards[each["prompt_id"]].append(each["reward"])
    means = {name: sum(own) / len(own) for name, own in rewards.items()}
    prompts = [tokenizer.encode(each["prompt"]) for each in rollouts]
    endings = [tokenizer.encode(each["text"]) or [0] for each in rollouts]
    order = range(len(rollouts))
    return {
        "texts": [[*a, *b] for a, b in zip(prompts, endings, strict=True)],
        "prompt_lens": [len(each) for each in prompts],
        "advantages": [each["reward"] - means[each["prompt_id"]] for each in rollouts],
        "batches": [list(order[i : i + _ROWS]) for i in order[::_ROWS]],
        "num_sequences": len(rollouts),
    }
