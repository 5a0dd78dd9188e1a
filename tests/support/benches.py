"""The scripts of benchmarks/: a run in a process of its own, or the options alone."""

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import longtail
import script

BENCHMARKS = Path(script.__file__).parent


def run_script(name: str, *words: str) -> tuple[int, str, dict[str, Any]]:
    """Run a script elsewhere, as a user does; return its exit code, its card and the result."""
    packages = Path(longtail.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, BENCHMARKS / f"{name}.py", *words],
        env={**os.environ, "PYTHONPATH": str(packages)},
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr
    card, _, last = done.stdout.rstrip().rpartition("\n")
    return done.returncode, card, json.loads(last)


def options(name: str, *words: str) -> Any:
    """Return the options of a script. Example: options("engine", "gsm", "--texts=4")"""
    return script.parse(import_module(name).Options, words)
