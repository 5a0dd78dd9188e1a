"""TRL's GRPO trainer in a process of its own, which makes one step each time it is asked to.

    python -I trl_worker.py {"arm": "auto", "model": DIR, "rows": FILE, "completions": 64, ...}

    <-- {"ready": "TRL 1.16.0"}              once
    --> any line                             for each step
    <-- {"gen_s": 9.1, "step_s": 80.2, "texts": ["9f3c..."], "logprob_gap": 1e-7, "tokens": 20000}

Arms: "trl" is TRL alone; "none" and "auto" are longtail's drafters. The directory of longtail's
sources comes with the job.
"""

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def main(job: dict[str, Any]) -> None:
    """Train one arm."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of the libraries goes to the log
    os.environ.update(WANDB_MODE="disabled", TRL_EXPERIMENTAL_SILENCE="1")
    sys.path.insert(0, job["sources"])
    import torch
    import trl

    torch.set_num_threads(job["threads"])

    def reply(found: dict[str, Any]) -> None:
        print(json.dumps(found), file=replies, flush=True)

    reply({"ready": f"TRL {trl.__version__}"})
    _train(job, reply)


def length_and_digits(completions: list[Any], **_: Any) -> list[float]:
    """Return a reward that any model has: the share of digits, less a bit for the length."""
    texts = [each[0]["content"] for each in completions]
    return [
        sum(letter.isdigit() for letter in text) / max(len(text), 1) - len(text) / 1e5
        for text in texts
    ]


def _train(job: dict[str, Any], reply: Any) -> None:
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    has_longtail = job["arm"] != "trl"
    seen: dict[str, Any] = {"gen_s": 0.0, "texts": [], "tokens": 0}

    class Steps(TrainerCallback):
        """Waits before each step, and reports it after its log."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if not sys.stdin.readline():
                raise SystemExit
            seen.update(gen_s=0.0, texts=[], tokens=0, began=time.perf_counter())

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "began" not in seen or "loss" not in (logs or {}):
                return
            found = {name: logs.get(name) for name in _METRICS}
            gap = logs.get("sampling/sampling_logp_difference/mean")
            step_s = time.perf_counter() - seen["began"]
            own = {name: seen[name] for name in ("gen_s", "texts", "tokens")}
            reply({**own, "step_s": step_s, "logprob_gap": gap, "metrics": found})

    args = GRPOConfig(
        job["out"],
        use_vllm=has_longtail,
        num_generations=job["group"],
        per_device_train_batch_size=job["micro_batch"],
        gradient_accumulation_steps=job["completions"] // job["micro_batch"],
        max_completion_length=job["max_tokens"],
        max_steps=job["steps"],
        learning_rate=job["learning_rate"],
        seed=job["seed"],
        bf16=job["dtype"] == "bfloat16",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    made = {
        "model": job["model"],
        "reward_funcs": length_and_digits,
        "train_dataset": Dataset.from_list(json.loads(Path(job["rows"]).read_text("utf-8"))),
        "args": args,
    }
    if has_longtail:
        from longtail.integrations.trl import longtail_rollouts

        with longtail_rollouts(drafter=job["arm"]) as rollouts:
            trainer = GRPOTrainer(**made, callbacks=[rollouts.callback(), Steps()])
            _measured(trainer, seen).train()
    else:
        _measured(GRPOTrainer(**made, callbacks=[Steps()]), seen).train()


_METRICS = ("rollout/spec_accept_length", "drafter/version", "reward")


def _measured(trainer: Any, seen: dict[str, Any]) -> Any:
    """Time the trainer's generation, with the transfer of weights, and digest its texts."""
    generate = trainer._generate_single_turn

    def timed(*args: Any, **named: Any) -> Any:
        began = time.perf_counter()
        completions, logprobs = generate(*args, **named)
        seen["gen_s"] += time.perf_counter() - began
        seen["texts"] += [
            hashlib.sha256(repr(each).encode()).hexdigest()[:16] for each in completions
        ]
        seen["tokens"] += sum(map(len, completions))
        return completions, logprobs

    trainer._generate_single_turn = timed
    return trainer


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
