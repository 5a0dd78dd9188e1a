"""What learns on a GPU, run on the CPU and on a pretended GPU; prints how far apart weights are.

python -m support.gpu_cases FOLDER
"""

import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from support.pretend_cuda import load, pretended

if __name__ == "__main__":
    load(Path(sys.argv[1]))

import torch
from torch import Tensor

from longtail.config.rl import LoraSection
from longtail.config.sft import SftTrainSection
from longtail.model.hf.adapters import AdaptedModel
from longtail.model.hf.causal import CausalModel
from longtail.model.hf.model import PolicyTransformer, empty_model
from longtail.rl.collectives import TorchProcessGroup
from longtail.rl.data.examples import Example
from longtail.rl.learner import Learner
from longtail.rl.sft_learner import SftLearner
from support import spot_training
from support.causal import random_model
from support.rank_processes import SETTINGS, Plan
from support.tiny_models import tiny_config, tiny_model

Learned = Mapping[str, Tensor]


def own(family: Any, device: str, dtype: torch.dtype) -> PolicyTransformer:
    """A tiny model, made on the device as a model that is read from files."""
    model = empty_model(tiny_config(family), dtype, device)
    with torch.no_grad():
        for name, drawn in tiny_model(family).named_parameters():
            model.get_parameter(name).copy_(drawn)
    return model


def step(model: Any, vocab: int = 128, **changes: Any) -> Learned:
    """A step of a learner with two updates."""
    learner = Learner(model, SETTINGS.model_copy(update=changes), total_steps=4)
    batches = Plan(seed=2, lengths=((3, 5), (2, 9), (4, 1)), mini_batches=2).batches()
    for one in (one for batch in batches for one in batch.micro_batches):
        one.packed.tokens.remainder_(vocab)
    learner.step(batches)
    dict(model.published())
    return learner.learned()


def whole(device: str) -> Learned:
    return step(own("qwen3", device, torch.float64), gradient_checkpointing=True)


def half(family: str) -> Callable[[str], Learned]:
    """Autocast on the GPU, float32 on the CPU."""
    return lambda device: step(own(family, device, torch.float32), autocast=device == "cuda")


def transformers(device: str) -> Learned:
    model = random_model("olmo2")
    return step(CausalModel(model.to(device)), model.config.vocab_size)


def adapters(device: str) -> Learned:
    model, lora = random_model("olmo2"), LoraSection(rank=4, dropout=0.1)
    return step(AdaptedModel(model.to(device), lora, 0), model.config.vocab_size)


def supervised(device: str) -> Learned:
    model = own("qwen3", device, torch.float64)
    example = Example(tokens=(5, 6, 7, 8, 1), prompt_len=2)
    SftLearner(model, SftTrainSection(warmup_steps=0)).step([example])
    return dict(model.named_parameters())


def drafter(device: str) -> Learned:
    """A few steps of a drafter's training by an idle worker, with Muon for its matrices."""
    spot_training.tiny_model = lambda: own("qwen3", device, torch.float32)
    made = spot_training.SpotSetup(matrix_rate=0.01)
    made.train(lambda: len(made.measured) == 1)
    return dict(made.layer.named_parameters())


def summed(device: str) -> Learned:
    """Sums over the ranks of a group without NCCL, as workers that share a GPU have it."""
    whole = [torch.arange(n, device=device) for n in (5, 7)]
    tensors = {"one": whole[0], "other": whole[1], "float": torch.ones(3, device=device)}
    with tempfile.TemporaryDirectory() as folder:
        group = TorchProcessGroup(0, 1, f"file://{folder}/at", backend="gloo", timeout_s=60.0)
        group.all_reduce(list(tensors.values()))
        group.close()
    return tensors


CASES: dict[str, Callable[[str], Learned]] = {
    "float64": whole, "tied": half("qwen2"), "windows": half("mistral"),
    "transformers": transformers, "adapters": adapters, "supervised": supervised,
    "summed": summed, "drafter": drafter,
}  # fmt: skip


def largest(one: Learned, other: Learned) -> float:
    """Return the largest difference of two sets of weights, over the largest weight."""
    apart = max(float((one[name] - other[name].cpu()).abs().max()) for name in one)
    return apart / max(float(each.abs().max()) for each in one.values())


if __name__ == "__main__":
    with pretended() as called:
        found = {}
        for name, case in CASES.items():
            expected, before = case("cpu"), len(called)
            difference = largest(expected, case("cuda"))
            flash = sum("_varlen_attn_backward" in each for each in called[before:])
            found[name] = (difference, flash)
    print(json.dumps(found))
