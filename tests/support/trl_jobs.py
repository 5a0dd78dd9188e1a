"""Small GRPO and RLOO jobs with the real TRL; also a program of several ranks.

python trl_jobs.py OUT PROCESSES        with the variables of torch.distributed, but for RANK
"""

import hashlib
import json
import multiprocessing
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
        "num_generations": 4, "per_device_train_batch_size": COMPLETIONS,
        "max_completion_length": 48, "max_steps": 3, "learning_rate": 1e-3, "logging_steps": 1,
        "save_strategy": "no", "report_to": "none", "bf16": False, "use_cpu": True,
        "disable_tqdm": True, "seed": 3,
    }  # fmt: skip
    return kind(str(out), **{**usual, **changes})


def dataset(size: int = 32) -> Any:
    """Return problems of the toy, as chat messages."""
    from datasets import Dataset

    rows = map(json.loads, toy.PROBLEMS.read_text(encoding="utf-8").splitlines()[:size])
    return Dataset.from_list([{"prompt": row["prompt"]} for row in rows])


def main(out: str, processes: str) -> int:
    """Import TRL, run the ranks of a GRPO job as forks of this process; 1 if one failed."""
    import torch
    from trl import GRPOConfig, GRPOTrainer

    from longtail.integrations.trl import longtail_rollouts

    del GRPOConfig, GRPOTrainer, longtail_rollouts
    torch.set_num_threads(1)
    ranks = []
    for number in range(int(processes)):
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(number)
        ranks.append(
            multiprocessing.get_context("fork").Process(
                target=rank, args=(Path(out), int(processes))
            )
        )
        ranks[-1].start()
    for each in ranks:
        each.join()
    return int(any(each.exitcode for each in ranks))


def rank(folder: Path, processes: int) -> None:
    """Run one rank; write its texts and the logged metrics."""
    from trl import GRPOConfig, GRPOTrainer

    from longtail.integrations.trl import longtail_rollouts

    recorder, size = Recorder(), COMPLETIONS // processes
    with longtail_rollouts(drafter="fresh") as rollouts:
        trainer = GRPOTrainer(
            model=str(toy.REASONER),
            reward_funcs=recorder,
            train_dataset=dataset(),
            args=arguments(
                GRPOConfig, folder, use_vllm=True, per_device_train_batch_size=size, max_steps=2
            ),
            callbacks=[rollouts.callback()],
        )
        trainer.train()
    found = {"texts": recorder.digests(), "log": trainer.state.log_history}
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
