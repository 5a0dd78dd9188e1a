"""Small GRPO and RLOO jobs with the real TRL; also a program for one rank of several.

python trl_jobs.py OUT PROCESSES        with RANK and the other variables of torch.distributed
"""

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from support import toy

COMPLETIONS = 8
"""Completions of a step, over all processes."""


class Recorder:
    """A reward function that keeps the tokens of every completion that it sees."""

    __name__ = "recorder"

    def __init__(self) -> None:
        self.texts: list[list[int]] = []

    def __call__(self, completions: Any, completion_ids: Any, **_: Any) -> list[float]:
        self.texts += [list(each) for each in completion_ids]
        return [(sum(each) % 7) / 7.0 for each in completion_ids]

    def digests(self) -> list[str]:
        """Return the digest of each text."""
        return [hashlib.sha256(repr(each).encode()).hexdigest()[:12] for each in self.texts]


def arguments(kind: type, out: Path, **changes: Any) -> Any:
    """Return GRPOConfig or RLOOConfig of a small run."""
    usual: dict[str, Any] = {
        "num_generations": 4,
        "per_device_train_batch_size": COMPLETIONS,
        "max_completion_length": 48,
        "max_steps": 3,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "bf16": False,
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 3,
    }
    return kind(str(out), **{**usual, **changes})


def dataset(size: int = 32) -> Any:
    """Return problems of the toy, as chat messages."""
    from datasets import Dataset

    rows = map(json.loads, toy.PROBLEMS.read_text(encoding="utf-8").splitlines()[:size])
    return Dataset.from_list([{"prompt": row["prompt"]} for row in rows])


def model() -> str:
    """Return the directory of the toy."""
    return str(toy.REASONER)


def main(out: str, processes: str) -> None:
    """Run one rank of a GRPO job; write its texts and the logged metrics."""
    import torch

    torch.set_num_threads(1)
    from trl import GRPOConfig, GRPOTrainer

    from longtail.integrations.trl import longtail_rollouts

    recorder, folder = Recorder(), Path(out)
    size = COMPLETIONS // int(processes)
    with longtail_rollouts(drafter="fresh") as rollouts:
        trainer = GRPOTrainer(
            model=model(),
            reward_funcs=recorder,
            train_dataset=dataset(),
            args=arguments(
                GRPOConfig, folder, use_vllm=True, per_device_train_batch_size=size, max_steps=1
            ),
            callbacks=[rollouts.callback()],
        )
        trainer.train()
    found = {"texts": recorder.digests(), "log": trainer.state.log_history}
    rank = os.environ.get("RANK", "0")
    (folder / f"rank{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
