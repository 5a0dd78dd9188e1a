"""Generate with transformers' `generate` and longtail's engine: the same texts, with drafts.

    python examples/transformers_generate.py [MODEL]

MODEL is a name as for `longtail generate`: a directory, a hub id, or smollm2.
"""

import sys
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from longtail.assembly.engine import model_directory
from longtail.integrations.transformers import generate

QUESTIONS = ("Add 6 + 8 + 2", "Add 3 + 1 + 4 + 1 + 5 + 9")


def main(name: str = "smollm2") -> None:
    """Answer the questions with and without drafts and print what the drafts change."""
    directory = model_directory(name)
    tokenizer = AutoTokenizer.from_pretrained(directory, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    texts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
    inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    inputs.pop("token_type_ids", None)
    options = dict(do_sample=True, top_k=0, max_new_tokens=200, num_return_sequences=2)
    options |= dict(custom_generate=generate, seed=3, return_dict_in_generate=True)
    outputs = {}
    for drafter in ("none", "auto", "auto"):  # the first call with a drafter measures step costs
        started = time.perf_counter()
        outputs[drafter] = model.generate(**inputs, **options, drafter=drafter)
        seconds = time.perf_counter() - started
        length = outputs[drafter].accept_length
        print(f"drafter {drafter}: {seconds:.2f} s, {length or 1:.2f} tokens per verified draft")
    assert torch.equal(outputs["none"].sequences, outputs["auto"].sequences)
    print("the texts are equal")
    width = inputs["input_ids"].shape[1]
    for text in tokenizer.batch_decode(
        outputs["auto"].sequences[:, width:], skip_special_tokens=True
    ):
        print("-", text.replace("\n", " ")[:100])


if __name__ == "__main__":
    main(*sys.argv[1:])
