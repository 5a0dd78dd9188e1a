"""GRPO with a tool, through TRL's own loop; longtail generates every turn.

    python examples/trl_tools.py [OUT]

The tiny reasoner was not trained for tools. Its usual last sentence, "The answer is 8.", is read as
a call of the tool `check`, whose result is the next message. Noise goes on over the turns of a
sample, and each turn is generated with drafts.
"""

import sys
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from longtail.assembly.models import model_directory
from longtail.integrations.trl import longtail_rollouts
from longtail.rl.data.tiny_task import problems

TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<assistant>{{ message['content'] }}"
    "{% for call in message.get('tool_calls') or [] %}"
    "{{ call['function']['name'] }} {{ call['function']['arguments'] | tojson }}"
    "{% endfor %}<eos>"
    "{% else %}<user>{{ message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<assistant>",
    "fields": {
        "tool_calls": {
            "open": "The answer is ",
            "close_pattern": r"\.",
            "repeats": True,
            "content": "text",
            "transform": {
                "type": "function",
                "function": {"name": "check", "arguments": {"answer": "{content}"}},
            },
        },
        "content": {"close_pattern": "<eos>", "content": "text"},
    },
}


def check(answer: str) -> str:
    """Comment on an answer.

    Args:
        answer: The number of steps.

    Returns:
        The next question.
    """
    number = int(answer) if answer.strip().isdigit() else 7
    return f"What comes after {max(number, 2) % 900}?"


def uses_tool(completions: list[Any], **_: Any) -> list[float]:
    """Return 1 for a completion with a tool's message."""
    return [
        float(any(message["role"] == "tool" for message in completion))
        for completion in completions
    ]


def main(out: str = "runs/trl-tools", *, steps: int = 3) -> None:
    """Train for a few steps and print how often the tool was called."""
    directory = str(model_directory("tiny-reasoner"))
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.chat_template, tokenizer.response_template = TEMPLATE, RESPONSE
    with longtail_rollouts(drafter="auto") as rollouts:
        trainer = GRPOTrainer(
            model=directory,
            reward_funcs=uses_tool,
            train_dataset=Dataset.from_list(problems(64, seed=0, split="train")),
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
