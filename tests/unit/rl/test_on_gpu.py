"""What learns on a GPU mixes no devices there and learns what it learns on a CPU.

The GPU is pretended (`support.pretend_cuda`): its numbers are computed on the CPU.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
CLOSE = {
    "float64": 1e-14, "transformers": 1e-6, "adapters": 1e-6, "supervised": 1e-14, "summed": 1e-14,
    "tied": 1e-3, "windows": 1e-3,
    "drafter": 1e-2,  # Muon divides by the size of small gradients
}  # fmt: skip
"""Largest difference of a weight, over the largest weight."""
HALF = {"tied", "windows"}
"""Decoders whose products are in bfloat16."""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="a C++ compiler makes the pretended GPU")
def test_all_that_learns_does_so_on_a_gpu_in_bfloat16_by_flash_attention(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "support.gpu_cases", str(tmp_path)]
    made = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=600)
    assert made.returncode == 0, made.stderr[-3000:]
    found = json.loads(made.stdout.splitlines()[-1])
    assert {name for name, (apart, _) in found.items() if apart <= CLOSE[name]} == CLOSE.keys()
    assert {name for name, (_, flash) in found.items() if flash} == HALF
