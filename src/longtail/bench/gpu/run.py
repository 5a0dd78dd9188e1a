"""`longtail bench gpu`: the engine on a GPU, against the limits of the GPU.

    checks        the kernels against their definitions, and a row's bits against its batch
    attention     the attention kernel against PyTorch's and against the bandwidth of a copy
    sampling      draws over 152k entries, 256 rows
    small         sum and norm, rotation, SwiGLU, storing: PyTorch, torch.compile and Triton
    steps         decoding, verification and drafting in the shape of Qwen2.5-7B, random weights
    graphs        memory of the CUDA graphs of one strategy and of all

All of it takes some minutes on one GPU. `--device cpu --quick` tries the benchmark itself, with
kernels in Triton's interpreter.
"""

import os

from longtail.bench.common.timing import progress
from longtail.bench.gpu.options import GpuBenchOptions
from longtail.errors import ConfigError


def run(options: GpuBenchOptions) -> int:
    """Measure, print the card, and end with one JSON line; return 1 if a check failed."""
    if options.device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
    import torch

    if options.device != "cpu" and not torch.cuda.is_available():
        raise ConfigError(
            f"--device {options.device}: PyTorch {torch.__version__} sees no GPU here. The "
            "benchmark needs one NVIDIA GPU with 40 GB or more and PyTorch's CUDA build; "
            "--device cpu --quick tries the benchmark itself"
        )
    from longtail.bench.common.card import print_card
    from longtail.bench.gpu import card
    from longtail.bench.gpu.measure import measure

    found = measure(options, progress("gpu"))
    result = card.as_json(options, found)
    print_card([card.table(options, found)], result, json_only=options.json)
    return 0 if found.get("checks", {"ok": True})["ok"] else 1
