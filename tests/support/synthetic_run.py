"""Files of a run that was never made: any number of steps, written as `longtail train` does."""

import json
import math
from pathlib import Path
from typing import Any

CONFIG = """[model]
path = "smollm2"
[speculation]
drafter = "auto"
[cluster]
workers = 2
[run]
steps = {steps}
"""
FILES = (
    "metrics.jsonl", "trace.json", "rollouts.jsonl", "drafts.jsonl", "speculation.jsonl",
    "drafter.jsonl",
)  # fmt: skip


def metrics_row(step: int) -> dict[str, float | None]:
    """Metrics of a step, each a simple function of its number."""
    row: dict[str, float | None] = {"step": step}
    if step == 1:
        row |= {"eval/reward_mean": 0.25, "eval/failures": 0.0}
    row |= {
        "reward/mean": 0.5 + 0.4 * math.sin(step / 40),
        "response_length/p50": 100.0 + step % 5,
        "response_length/p90": 400.0,
        "response_length/p99": 900.0,
        "response_length/max": 1000.0 + step % 11,
        "rollout/tokens_per_s": 3000.0 + step % 13,
        "speculation/accept_length": 4.0 + (step % 9) / 10,
        "timing_s/rollout": 6.0,
        "timing_s/reward": 0.01,
        "timing_s/learn": 3.5 + step % 3,
        "timing_s/logprob": 1.5,
        "timing_s/update": 2.0 + step % 3,
        "timing_s/publish": 0.05,
        "timing_s/drafter": 0.02,
        "timing_s/step": 10.0 + step % 3,
        "cluster/idle_s": 0.5,
        "cluster/spot_s": 1.5 + step % 2,
        "cluster/idle_utilization": 0.8,
        "drafter/version": float(step // 4),
        "drafter/expected_accept_length": None if step < 4 else 4.5,
    }
    return row


def trace_lines(step: int) -> list[str]:
    """States of two workers in a step of 10 s: worker 1 trains the drafter from second 4 on."""
    begin = 10.0 * step
    spans = [
        ("generating", 0, 0.0, 6.0), ("learning", 0, 6.0, 10.0), ("generating", 1, 0.0, 4.0),
        ("spot", 1, 4.0, 5.9), ("idle", 1, 5.9, 6.0), ("learning", 1, 6.0, 10.0),
    ]  # fmt: skip
    args = {"step": step}
    events: list[dict[str, Any]] = [
        {
            "name": state, "ph": "X", "ts": 1e6 * (begin + a), "dur": round(1e6 * (b - a), 3),
            "pid": 0, "tid": worker, "args": args,
        }
        for state, worker, a, b in spans
    ]  # fmt: skip
    events.append(
        {
            "name": f"drafter v{step} offered", "ph": "i", "s": "t", "ts": 1e6 * (begin + 5.5),
            "pid": 0, "tid": 1, "args": args,
        }
    )  # fmt: skip
    return [json.dumps(event) + ",\n" for event in events]


def rollout_rows(step: int) -> list[dict[str, Any]]:
    """Completions of a step: lengths 10, 20, 40, ..., the first with a reward of 1.

    The third is an episode.
    """
    said = [f"step {step}", "completion 2", ": <b>not bold</b>"]
    roles = ["assistant", "tool", "assistant"]
    messages = [{"role": a, "content": b} for a, b in zip(roles, said, strict=True)]
    episode = {"messages": messages, "rewards": [0.5, 0.0], "num_calls": 2, "num_bad_calls": 1}
    return [
        {
            "step": step,
            "prompt_id": f"task/{step}/{index // 2}",
            "request_id": f"task/{step}/{index // 2}#{index % 2}",
            "policy_version": step - 1,
            "reward": float(index == 0),
            "num_tokens": 10 * 2**index,
            "finish_reason": "stop",
            "logprob": -3.5,
            "prompt": f"What is {step} + {index}?",
            "text": f"step {step}, completion {index}: <b>not bold</b>",
            **(episode if index == 2 else {}),
        }
        for index in range(4)
    ]


def drafts_row(step: int) -> dict[str, Any]:
    """Drafted characters: "step" of the first completion, nothing of the others."""
    return {"step": step, "drafted": {rollout_rows(step)[0]["request_id"]: [0, 4, 6, 6]}}


def speculation_row(step: int, worker: int = 0, num: int = 60) -> dict[str, Any]:
    """A rollout of 60 engine steps that drafts from the 20th on."""
    drafts = [0 if index < 20 else 2 for index in range(num)]
    return {
        "step": step,
        "kind": "training",
        "worker": worker,
        "costs": None,
        "seconds": [round(0.1 * (index + 1), 6) for index in range(num)],
        "running": [max(num - index, 1) for index in range(num)],
        "drafts": drafts,
        "nodes": [6 * each for each in drafts],
        "accepted": [2 * each for each in drafts],
        "switches": [[min(20, num - 1), True, "predicted 1.30x of plain decoding at 40 running"]],
    }


def decision_row(step: int) -> dict[str, Any]:
    """A publication in each step."""
    return {
        "step": step, "what": "published", "version": step, "before": 4.0, "after": 4.5,
        "num_tokens": 900, "reason": "",
    }  # fmt: skip


def append_steps(directory: Path, first: int, last: int) -> None:
    """Append steps to the files of a run, made if they do not exist."""
    directory.mkdir(parents=True, exist_ok=True)
    config = directory / "config.toml"
    if not config.exists():
        config.write_text(CONFIG.format(steps=max(last, 1)))
        (directory / "trace.json").write_text("[\n")
    for step in range(first, last + 1):
        rows = {
            "rollouts.jsonl": rollout_rows(step),
            "speculation.jsonl": [speculation_row(step, worker) for worker in (1, 0)],
            "drafts.jsonl": [drafts_row(step)],
            "drafter.jsonl": [decision_row(step)],
            "metrics.jsonl": [metrics_row(step)],
        }
        lines = {name: [json.dumps(row) + "\n" for row in each] for name, each in rows.items()}
        for name, each in ({"trace.json": trace_lines(step)} | lines).items():
            with (directory / name).open("a", encoding="utf-8") as file:
                file.writelines(each)
