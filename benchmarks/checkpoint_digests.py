"""What digests cost: writing and checking a checkpoint as large as the arguments say, in turns.

    python benchmarks/checkpoint_digests.py FOLDER --gigabytes 6

Random tensors, a third of the bytes in the policy and the rest beside it, as float32 weights and
AdamW's moments are. `without` writes the same files and leaves the digests out. The last line is
one JSON object.
"""

import argparse
import json
import os
import platform
import shutil
import time
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch

from longtail.run.checkpoint import RunDirectory
from longtail.system import tensor_files
from longtail.system.files import digest

_TENSOR_BYTES = 2**28


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gigabytes", type=float, default=6.0)
    parser.add_argument("--repeats", type=int, default=3)
    own = parser.parse_args()
    count = int(own.gigabytes * 1e9 / _TENSOR_BYTES)
    whole = {f"w{i}": torch.randn(_TENSOR_BYTES // 4) for i in range(count)}
    policy = dict(list(whole.items())[: count // 3])
    rest = {name: each for name, each in whole.items() if name not in policy}
    run = RunDirectory(own.folder, keep=1)
    seconds: dict[str, list[float]] = {"with": [], "without": [], "checked": []}
    loads = [os.getloadavg()[0]]
    for step in range(1, 2 * own.repeats + 1):
        kind = "without" if step % 2 else "with"
        began = time.perf_counter()
        chosen = digest if kind == "with" else lambda path: ""
        with patch("longtail.run.state_file.digest", chosen):
            run.save(
                step, lambda path: tensor_files.save(policy, path / "model.safetensors"), rest, {}
            )
        seconds[kind].append(time.perf_counter() - began)
        if kind == "with":
            began = time.perf_counter()
            assert run.load_latest() is not None
            seconds["checked"].append(time.perf_counter() - began)
        loads.append(os.getloadavg()[0])
    shutil.rmtree(own.folder)
    print(f"a checkpoint of {count * _TENSOR_BYTES / 1e9:.1f} GB, {own.repeats} times in turns")
    for name, label in (
        ("without", "written without digests"),
        ("with", "written with digests"),
        ("checked", "checked when it is read"),
    ):
        found = seconds[name]
        print(f"{label:26}{median(found):8.1f} s ({min(found):.1f} to {max(found):.1f})")
    added = median(seconds["with"]) - median(seconds["without"])
    print(f"{'digests add':26}{added:8.1f} s")
    print(f"load of the machine {min(loads):.1f} to {max(loads):.1f}, on {os.cpu_count()} cores")
    card = {
        "bench": "checkpoint digests",
        "gigabytes": count * _TENSOR_BYTES / 1e9,
        "seconds": seconds,
        "added_s": added,
        "load": loads,
        "environment": {"cores": os.cpu_count(), "python": platform.python_version()},
    }
    print(json.dumps(card))


if __name__ == "__main__":
    main()
