"""The toy: a model of 1.6M parameters that reasons in writing, its drafters, its problems.

The files are in tests/toy; `benchmarks/make_toy.py` has the task, and writes them.
"""

import re
from pathlib import Path
from typing import Any

TOY = Path(__file__).parents[1] / "toy"
REASONER = TOY / "reasoner"
"""Hugging Face directory, bfloat16."""
DRAFTERS = {recipe: TOY / recipe for recipe in ("eagle1", "eagle3")}
PROBLEMS = TOY / "problems.jsonl"
"""64 problems, in an order in which every batch has short and long ones."""
WORDS = (
    f"--model.path={REASONER}", f"--data.source={PROBLEMS}", "--data.shuffle=false",
    "--reward.name=support.toy:reward", f"--speculation.drafter={DRAFTERS['eagle1']}",
    "--learner.learning_rate=3e-4",
)  # fmt: skip
"""Options of a training run of the toy."""


def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """Return 1 for a completion whose last number after the thinking is the answer, else 0."""
    rewards = []
    for (message,), right in zip(completions, answer, strict=True):
        _thinking, closed, conclusion = message["content"].rpartition("</think>")
        numbers = re.findall(r"\d+", conclusion)
        rewards.append(float(bool(closed) and numbers[-1:] == [right]))
    return rewards
