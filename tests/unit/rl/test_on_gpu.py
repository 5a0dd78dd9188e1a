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
    "float64": 1e-14,
    "transformers": 1e-6,
    "adapters": 1e-6,
    "supervised": 1e-14,
    "summed": 1e-14,
}
"""Largest difference of a weight, over the largest weight."""
HALF = ("tied", "normed queries", "windows")
"""Decoders whose products are in bfloat16."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[float, int]]:
    """Difference of the weights, and calls of FlashAttention's backward pass, by case."""
    if shutil.which("g++") is None:
        pytest.skip("a C++ compiler makes the pretended GPU")
    command = [sys.executable, "-m", "support.gpu_cases", str(tmp_path_factory.mktemp("gpu"))]
    made = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=600)
    assert made.returncode == 0, made.stderr[-3000:]
    return json.loads(made.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("case", CLOSE)
def test_weights_are_those_of_the_cpu(found, case):
    difference, _ = found[case]
    assert difference < CLOSE[case]


@pytest.mark.slow
@pytest.mark.parametrize("case", HALF)
def test_in_bfloat16_flash_attention_takes_the_packed_sequences(found, case):
    difference, calls = found[case]
    assert calls > 0
    assert difference < 1e-3


@pytest.mark.slow
def test_a_drafter_learns(found):
    difference, _ = found["drafter"]
    assert 0 < difference < 1e-2  # Muon divides by the size of small gradients
