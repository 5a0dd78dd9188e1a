"""`longtail bench gpu`: what the engine does on a GPU, against what the GPU could do.

    checks        the kernels against their definitions, and a row's bits against its batch
    attention     the attention kernel beside PyTorch's, and the share of the copy bandwidth it has
    sampling      draws over 152k entries, 256 rows
    small         sum and norm, rotation, SwiGLU, storing: PyTorch's, torch.compile's and ours
    steps         decoding, verification and drafting in the shape of Qwen2.5-7B, random weights
    graphs        memory of the graphs of one strategy and of all
    speculation   rollouts with and without, by the tiny reasoner grown to that shape
    training      RL from end to end with one worker, by the tiny reasoner grown to 100M parameters

All of it takes some minutes on one GPU. Without one it says so; `--device cpu --quick` tries the
bench itself, kernels in Triton's interpreter. What needs torch is imported when measuring starts.
"""

import argparse
import os
import sys

from longtail.bench.gpu.options import Setting, add_arguments, read_setting
from longtail.errors import ConfigError

__all__ = ["add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    """Measure, print the card, and end with one JSON line; return 1 if a check failed."""
    setting = read_setting(args)
    if setting.device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
    _check_device(setting)
    from longtail.bench.common.report import finish
    from longtail.bench.gpu import card as gpu_card
    from longtail.bench.gpu.parts import measure

    found = measure(setting, _say)
    finish(
        gpu_card.title(setting, found),
        gpu_card.COLUMNS,
        gpu_card.rows(found),
        gpu_card.as_json(setting, found),
        json_only=args.json,
    )
    return 0 if found.get("checks", {"ok": True})["ok"] else 1


def _check_device(setting: Setting) -> None:
    import torch

    if setting.device != "cpu" and not torch.cuda.is_available():
        raise ConfigError(
            f"--device {setting.device}: PyTorch {torch.__version__} sees no GPU here. The bench "
            "needs one NVIDIA GPU with 40 GB or more and PyTorch's CUDA build; "
            "--device cpu --quick tries the bench itself"
        )


def _say(text: str) -> None:
    print(f"bench gpu: {text}", file=sys.stderr, flush=True)
