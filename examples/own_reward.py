"""Train with a reward of your own: a right answer earns 1, and up to 0.5 more if it is short.

    python examples/own_reward.py [RUN_DIR] [MODEL]

The reward is a function with TRL's signature. longtail imports it in a process of its own, which is
killed after `reward.timeout_s`. In a run file: [reward] name = "own_reward:short_answer".
"""

import re
import sys
from typing import Any

from longtail import RunConfig, train


def short_answer(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """Return a reward for each completion; `answer` is a column of the data."""
    rewards = []
    for text, right in zip(completions, answer, strict=True):
        numbers = re.findall(r"\d+", text)
        is_right = bool(numbers) and numbers[-1] == right
        rewards.append(is_right * (1.5 - 0.5 * min(len(text) / 2000, 1.0)))
    return rewards


def main(run_dir: str = "runs/own-reward", model: str = "smollm2", **run: Any) -> int:
    """Train for a few steps and return the exit code."""
    config = RunConfig.model_validate(
        {
            "model": {"path": model},
            "reward": {"name": "own_reward:short_answer"},
            "rollout": {"prompts_per_step": 4, "group_size": 4, "max_tokens": 256},
            "learner": {"learning_rate": 1e-5},  # 135M parameters; large models want 1e-6
            "data": {"heldout_size": 8},
            "run": {"dir": run_dir, "steps": 4, **run},
        }
    )
    return train(config)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
