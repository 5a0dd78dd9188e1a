"""GRPO of a LoRA adapter with TRL; longtail generates with the merged weights.

    python examples/trl_peft.py [OUT] [MODEL]

Needs peft.
"""

import sys
from typing import Any

from datasets import Dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

from longtail.integrations.trl import longtail_rollouts
from longtail.rl.data.sum_task import problems
from longtail.run.base_model import model_directory


def is_short(completions: list[Any], **_: Any) -> list[float]:
    """Return the share of the length that is left."""
    return [1.0 - min(len(completion[0]["content"]) / 1000.0, 1.0) for completion in completions]


def main(out: str = "runs/trl-peft", model: str = "smollm2", *, steps: int = 4) -> None:
    """Train the adapter for a few steps and print the metrics of the rollouts."""
    rows = [
        {**row, "prompt": [{"role": "user", "content": row["prompt"]}]}
        for row in problems(64, seed=0, heldout=False)
    ]
    with longtail_rollouts(drafter="auto") as rollouts:
        trainer = GRPOTrainer(
            model=str(model_directory(model)),
            reward_funcs=is_short,
            train_dataset=Dataset.from_list(rows),
            args=GRPOConfig(
                out,
                num_generations=8,
                per_device_train_batch_size=16,
                max_completion_length=192,
                max_steps=steps,
                learning_rate=1e-3,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                use_vllm=True,
                bf16=False,
                use_cpu=True,
            ),
            callbacks=[rollouts.callback()],
            peft_config=LoraConfig(r=8, target_modules="all-linear"),
        )
        trainer.train()
    for row in trainer.state.log_history:
        if "timing_s/gen" in row:
            shown = ("reward", "timing_s/gen", "rollout/spec_accept_length")
            print(f"step {row['step']}", *(f"{name} {row.get(name, 0):.3f}" for name in shown))


if __name__ == "__main__":
    main(*sys.argv[1:])
