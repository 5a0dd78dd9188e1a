"""What learns on a GPU mixes no devices there and learns what it learns on a CPU.

The GPU is pretended (`support.pretend_cuda`): its numbers are computed on the CPU. One case for
each mechanism that is a GPU's own: autocast with attention by FlashAttention, within a window too;
transformers' code with adapters; Muon and features of the target; sums of a group without NCCL.
"""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from support.pretend_cuda import load, pretended

if __name__ == "__main__":
    load(Path(sys.argv[1]))

import torch
from torch import Tensor

from longtail.config.rl import LoraSection
from longtail.model.hf.adapters import AdaptedModel
from longtail.model.hf.model import PolicyTransformer, empty_model
from longtail.model.transformer import Family
from longtail.rl.collectives import TorchProcessGroup
from longtail.rl.learner import Learner
from support import spot_training
from support.causal import random_model
from support.rank_processes import SETTINGS, Plan
from support.tiny_models import tiny_config, tiny_model

TESTS = Path(__file__).parents[2]
Learned = Mapping[str, Tensor]


def own(family: Family, device: str) -> PolicyTransformer:
    """A tiny model, made on the device as a model that is read from files."""
    model = empty_model(tiny_config(family), torch.float32, device)
    with torch.no_grad():
        for name, drawn in tiny_model(family).named_parameters():
            model.get_parameter(name).copy_(drawn)
    return model


def step(model: PolicyTransformer | AdaptedModel, vocab: int, **changes: object) -> Learned:
    """A step of a learner with two updates."""
    learner = Learner(model, SETTINGS.model_copy(update=changes), total_steps=4)
    batches = Plan(seed=2, lengths=((3, 5), (2, 9), (4, 1)), mini_batches=2).batches()
    for one in (one for batch in batches for one in batch.micro_batches):
        one.packed.tokens.remainder_(vocab)
    learner.step(batches)
    dict(model.published())
    return learner.learned()


def windows(device: str) -> Learned:
    """Autocast on the GPU, float32 on the CPU."""
    on_gpu = device == "cuda"
    return step(own("mistral", device), 128, autocast=on_gpu, gradient_checkpointing=on_gpu)


def adapters(device: str) -> Learned:
    model, lora = random_model("olmo2"), LoraSection(rank=4)
    return step(AdaptedModel(model.to(device), lora, 0), model.config.vocab_size)


def drafter(device: str) -> Learned:
    """A few steps of a drafter's training by an idle worker, with Muon for its matrices."""
    spot_training.tiny_model = lambda: own("qwen3", device)
    made = spot_training.SpotSetup(matrix_rate=0.01)
    made.train(lambda: len(made.measured) == 1)
    return dict(made.layer.named_parameters())


def summed(device: str) -> Learned:
    """Sums over the ranks of a group without NCCL, as workers that share a GPU have it."""
    tensors = {str(n): torch.arange(n, device=device) for n in (5, 7)}
    tensors["float"] = torch.ones(3, device=device)
    with tempfile.TemporaryDirectory() as folder:
        group = TorchProcessGroup(0, 1, f"file://{folder}/at", backend="gloo", timeout_s=60.0)
        group.all_reduce(list(tensors.values()))
        group.close()
    return tensors


# Largest difference of a weight, over the largest one; Muon divides by the size of small gradients.
CASES = ((windows, 1e-3), (adapters, 1e-6), (drafter, 1e-2), (summed, 1e-14))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="a C++ compiler makes the pretended GPU")
def test_all_that_learns_does_so_on_a_gpu_in_bfloat16_by_flash_attention(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "unit.rl.test_on_gpu", str(tmp_path)]
    made = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=600)
    assert made.returncode == 0, made.stderr[-3000:]


if __name__ == "__main__":
    with pretended() as called:
        for case, most in CASES:
            expected, before = case("cpu"), len(called)
            found = case("cuda")
            apart = max(float((expected[n] - found[n].cpu()).abs().max()) for n in expected)
            assert apart <= most * max(float(x.abs().max()) for x in expected.values()), case
            flash = any("_varlen_attn_backward" in each for each in called[before:])
            assert flash == (case is windows), case
