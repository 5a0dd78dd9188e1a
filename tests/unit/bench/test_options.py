"""Options of the benchmarks."""

import subprocess
import sys

import pytest

from longtail.bench.options import BENCHES
from longtail.errors import ConfigError
from support.benches import parse


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("engine --contestants tuned", "--contestants = 'tuned': others are compared to plain"),
        ("e2e --arms off,warm", r"--arms\[1\] = warm: it must be 'off', 'frozen'"),
        ("e2e --arms spot,off", "--arms = 'spot,off': off comes first"),
        ("e2e --arms off", "--arms = 'off': off comes first, and others"),
        ("e2e --arms off,spot,spot", "each arm is given once"),
        ("e2e --steps 0", "--steps = 0: it must be greater"),
    ],
)
def test_each_benchmark_refuses_an_impossible_option_by_name(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(*words.split())


@pytest.mark.parametrize("name", sorted({*BENCHES} - {"vllm"}))
def test_every_benchmark_runs_on_a_real_model_without_options(name: str) -> None:
    assert parse(name).run == "smollm2"


def test_declaring_the_options_needs_no_torch() -> None:
    code = "import sys, longtail.bench.options; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
