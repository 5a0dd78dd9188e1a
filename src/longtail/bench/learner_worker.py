"""A training step of transformers or of TRL in a process of its own; run by path, not imported.

    python -I learner_worker.py {"kind": "transformers", "model_dir": DIR, "threads": 1,
                                 "device": "cpu", "autocast": true}

    --> {"texts": [[1, 2, 3]], "prompt_lens": [1], "advantages": [1.0],
         "batches": [[0]], "num_sequences": 1}
    <-- {"ready": "transformers 5.23.0, sdpa"}             once, when the model is loaded
    <-- {"forward": 1.0, "backward": 2.1, "update": 0.4, "loss": 0.0, "grad_norm": 1.5}

longtail is not imported. Both train float32 weights with a fused AdamW.
`transformers` is a plain loop that computes nothing but the GRPO loss; `trl` calls the loss of
TRL's own trainer.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

Loss = Callable[[Any, int], Any]
"""Loss of one padded micro-batch of a step of a number of sequences."""


def padded(turn: dict[str, Any], members: list[int]) -> dict[str, Any]:
    """Return prompts, padded on the left, and completions, padded on the right."""
    import torch

    texts = [turn["texts"][i] for i in members]
    prompts = [text[: turn["prompt_lens"][i]] for text, i in zip(texts, members, strict=True)]
    endings = [text[turn["prompt_lens"][i] :] for text, i in zip(texts, members, strict=True)]
    left, right = max(map(len, prompts)), max(map(len, endings))
    return {
        "prompt_ids": torch.tensor([[0] * (left - len(each)) + each for each in prompts]),
        "prompt_mask": torch.tensor([[0] * (left - len(p)) + [1] * len(p) for p in prompts]),
        "completion_ids": torch.tensor([each + [0] * (right - len(each)) for each in endings]),
        "completion_mask": torch.tensor([[1] * len(e) + [0] * (right - len(e)) for e in endings]),
        "advantages": torch.tensor([turn["advantages"][i] for i in members]),
    }


def load_transformers(spec: dict[str, Any]) -> tuple[str, Any, Loss]:
    """Load a model, and the loss in the fewest operations."""
    import torch
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        spec["model_dir"], dtype=torch.float32, attn_implementation="sdpa"
    )
    model.train()

    def loss(batch: dict[str, Any], num_sequences: int) -> Any:
        tokens = torch.cat((batch["prompt_ids"], batch["completion_ids"]), 1)
        mask = torch.cat((batch["prompt_mask"], batch["completion_mask"]), 1)
        ids, weights = batch["completion_ids"], batch["completion_mask"]
        logits = model(
            input_ids=tokens, attention_mask=mask, logits_to_keep=ids.shape[1] + 1, use_cache=False
        ).logits[:, :-1]
        logprobs = logits.float().log_softmax(-1).gather(-1, ids[:, :, None])[:, :, 0]
        ratio = (logprobs - logprobs.detach()).exp()
        terms = -ratio * batch["advantages"][:, None] * weights
        return (terms.sum(1) / weights.sum(1)).sum() / num_sequences

    return f"transformers {transformers.__version__}, sdpa", model, loss


def load_trl(spec: dict[str, Any]) -> tuple[str, Any, Loss]:
    """Load TRL's GRPO trainer."""
    import torch
    import transformers

    datasets, trl = import_module("datasets"), import_module("trl")
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        spec["model_dir"], dtype=torch.float32, attn_implementation="sdpa"
    )
    arguments = trl.GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=spec["device"] == "cpu",
        bf16=True,
        report_to=[],
        loss_type="grpo",
        beta=0.0,
        gradient_checkpointing=False,
    )
    trainer: Any = trl.GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=arguments,
        train_dataset=datasets.Dataset.from_dict({"prompt": ["1"] * 8}),
        processing_class=transformers.AutoTokenizer.from_pretrained(spec["model_dir"]),
    )
    trainer.model.train()

    def loss(batch: dict[str, Any], num_sequences: int) -> Any:
        # TRL averages over a micro-batch and divides by the number of them.
        trainer.current_gradient_accumulation_steps = num_sequences / len(batch["advantages"])
        return trainer.compute_loss(trainer.model, batch)

    return f"TRL {trl.__version__}, transformers {transformers.__version__}", trainer.model, loss


def main(spec: dict[str, Any]) -> None:
    """Load, then make a step for each line until standard input ends."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of the libraries goes to the log
    os.environ.setdefault("WANDB_DISABLED", "true")
    import torch

    torch.set_num_threads(spec["threads"])
    load = {"transformers": load_transformers, "trl": load_trl}[spec["kind"]]
    description, model, loss = load(spec)
    model.to(spec["device"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0, fused=True)
    print(json.dumps({"ready": description}), file=replies, flush=True)
    for line in sys.stdin:
        seconds = step(json.loads(line), model, loss, optimizer, spec["autocast"])
        print(json.dumps(seconds), file=replies, flush=True)


def step(
    turn: dict[str, Any], model: Any, loss: Loss, optimizer: Any, autocast: bool
) -> dict[str, float]:
    """Make one update and return its seconds."""
    import torch

    forward = backward = total = 0.0
    for members in turn["batches"]:
        device, batch = model.device, padded(turn, members)
        start = time.perf_counter()
        batch = {name: each.to(device) for name, each in batch.items()}
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            part = loss(batch, turn["num_sequences"])
        middle = now(device)
        part.backward()
        forward += middle - start
        backward += now(device) - middle
        total += float(part.detach())
    start = time.perf_counter()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return {
        "forward": forward,
        "backward": backward,
        "update": now(model.device) - start,
        "loss": total,
        "grad_norm": float(norm),
    }


def now(device: Any) -> float:
    """Wait for a device, and return the time."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
