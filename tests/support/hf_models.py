"""Tiny models opened by transformers, and batches for its `generate`."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from longtail.integrations.transformers import generate
from longtail.model.hf.model import save_model
from longtail.model.transformer import Family
from support.tiny_models import tiny_model, tiny_tokenizer

PAD, EOS = 0, 1


def opened(directory: Path, family: Family = "qwen3") -> PreTrainedModel:
    """Return a model that transformers reads from below the directory, in float64."""
    path = directory / family
    if not path.is_dir():
        save_model(tiny_model(family), path, eos_ids=(EOS,))
        tiny_tokenizer().save(path)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)


def batch(*prompts: str) -> dict[str, Tensor]:
    """Return prompts as a batch padded on the left."""
    rows = [tiny_tokenizer().encode(prompt) for prompt in prompts]
    width = max(map(len, rows))
    ids = [[PAD] * (width - len(row)) + list(row) for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def sampled(model: PreTrainedModel, *prompts: str, **more: Any) -> list[list[int]]:
    """Return what each row samples, without prompt and padding."""
    inputs = batch(*prompts)
    options = dict(do_sample=True, max_new_tokens=24, pad_token_id=PAD, seed=3, drafter="none")
    rows = model.generate(**inputs, custom_generate=generate, **options | more)
    rows = rows[:, inputs["input_ids"].shape[1] :].tolist()
    return [row[: row.index(EOS) + 1] if EOS in row else row for row in rows]
