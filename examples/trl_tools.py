"""GRPO with a tool, through TRL's own loop; longtail generates every turn.

    python examples/trl_tools.py [OUT] [MODEL]

SmolLM2 was not trained for tools. A total that it writes, "= 8", is read as a call of the tool
`check`, whose result is the next message. Noise goes on over the turns of a sample, and each turn
is generated with drafts. A MODEL whose tokenizer has a `response_template` keeps its own calls.
"""

import sys
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from longtail.integrations.trl import longtail_rollouts
from longtail.rl.data.sum_task import problems
from longtail.run.base_model import model_directory

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% for call in message.get('tool_calls') or [] %}"
    "= {{ call['function']['arguments']['total'] }}\n"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open": "= ",
            "close_pattern": r"\D|$",
            "repeats": True,
            "content": "text",
            "transform": {
                "type": "function",
                "function": {"name": "check", "arguments": {"total": "{content}"}},
            },
        },
        "content": {"close_pattern": r"<\|im_end\|>", "content": "text"},
    },
}


def check(total: str) -> str:
    """Comment on a total.

    Args:
        total: The sum so far.

    Returns:
        The next question.
    """
    return f"Add {total.strip() or 0} + 7"


def uses_tool(completions: list[Any], **_: Any) -> list[float]:
    """Return 1 for a completion with a tool's message."""
    return [
        float(any(message["role"] == "tool" for message in completion))
        for completion in completions
    ]


def main(out: str = "runs/trl-tools", model: str = "smollm2", *, steps: int = 3) -> None:
    """Train for a few steps and print how often the tool was called."""
    directory = str(model_directory(model))
    tokenizer = AutoTokenizer.from_pretrained(directory)
    if tokenizer.response_template is None:
        tokenizer.chat_template, tokenizer.response_template = TEMPLATE, RESPONSE
    rows = [
        {**row, "prompt": [{"role": "user", "content": row["prompt"]}]}
        for row in problems(64, seed=0, heldout=False)
    ]
    with longtail_rollouts(drafter="auto") as rollouts:
        trainer = GRPOTrainer(
            model=directory,
            reward_funcs=uses_tool,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            tools=[check],
            args=GRPOConfig(
                out,
                use_vllm=True,
                num_generations=8,
                per_device_train_batch_size=16,
                max_completion_length=512,
                max_tool_calling_iterations=2,
                max_steps=steps,
                learning_rate=1e-5,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                bf16=False,
                use_cpu=True,
            ),
            callbacks=[rollouts.callback()],
        )
        trainer.train()
    for row in trainer.state.log_history:
        if "timing_s/gen" in row:
            shown = ("reward", "tools/call_frequency", "timing_s/gen", "rollout/spec_accept_length")
            print(f"step {row['step']}", *(f"{name} {row.get(name, 0):.3f}" for name in shown))


if __name__ == "__main__":
    main(*sys.argv[1:])
