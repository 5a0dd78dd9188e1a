"""The example of transformers' `generate`, run as a user runs it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import toy

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_example_writes_the_same_texts_with_and_without_drafts() -> None:
    found = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "transformers_generate.py"), str(toy.REASONER)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert found.returncode == 0, found.stderr
    lines = found.stdout.splitlines()
    assert [line.split(":")[0] for line in lines[:3]] == ["drafter none"] + ["drafter auto"] * 2
    assert lines[3] == "the texts are equal"
    assert len(lines) == 8
