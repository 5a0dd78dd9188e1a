"""GRPO with TRL, where longtail generates: a drafter begins fresh and learns during the run.

    python examples/trl_grpo.py [OUT] [MODEL]

MODEL is a name or directory as for `longtail train --model.path`. For several processes: accelerate
launch --cpu --num_processes 2 examples/trl_grpo.py. The drafter is written to OUT/drafter-for-vllm.
"""

import sys
from pathlib import Path
from typing import Any

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from longtail.integrations.trl import longtail_rollouts
from longtail.rl.data.sum_task import problems
from longtail.run.base_model import model_directory


def states_answer(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """Return 1 for a completion whose last word is the answer."""
    texts = [completion[0]["content"] for completion in completions]
    return [
        float(text.rstrip(" .").endswith(f" {right}"))
        for text, right in zip(texts, answer, strict=True)
    ]


def main(out: str = "runs/trl-grpo", model: str = "smollm2", *, steps: int = 6) -> None:
    """Train for a few steps, print the metrics of the rollouts, and export the drafter."""
    rows = [
        {**row, "prompt": [{"role": "user", "content": row["prompt"]}]}
        for row in problems(64, seed=0, heldout=False)
    ]
    args = GRPOConfig(
        out,
        use_vllm=True,
        num_generations=8,
        per_device_train_batch_size=16,
        max_completion_length=192,
        max_steps=steps,
        learning_rate=1e-5,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        bf16=False,
        use_cpu=True,
    )
    with longtail_rollouts(drafter="auto") as rollouts:
        trainer = GRPOTrainer(
            model=str(model_directory(model)),
            reward_funcs=states_answer,
            train_dataset=Dataset.from_list(rows),
            args=args,
            callbacks=[rollouts.callback()],
        )
        trainer.train()
    if trainer.accelerator.is_main_process:
        for row in trainer.state.log_history:
            if "timing_s/gen" in row:
                shown = ("reward", "timing_s/gen", "rollout/spec_accept_length", "drafter/version")
                print(f"step {row['step']}", *(f"{name} {row.get(name, 0):.3f}" for name in shown))
        place = rollouts.export(Path(out) / "drafter-for-vllm")
        print(f"drafter for vLLM: {place}")


if __name__ == "__main__":
    main(*sys.argv[1:])
