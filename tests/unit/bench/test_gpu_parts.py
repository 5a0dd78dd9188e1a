"""Each command of `make bench-gpu` is one that longtail has."""

import argparse
import runpy
from pathlib import Path

from longtail.config import files
from longtail.config.rl import load
from support.benches import parse

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "gpu.py"
GIVEN = argparse.Namespace(
    model=Path("/m"), large=Path("/l"), reasoner=Path("/r"), out=Path("/o"), only=""
)


def test_the_commands_are_known_and_change_no_other_field_than_they_say() -> None:
    parts = runpy.run_path(str(SCRIPT))["parts"](GIVEN)
    assert list(parts) == ["engines", "loop", "large", "pair", "learner", "exact", "reasoner"]
    assert sum(part.limit_s for part in parts.values()) < 960
    paths = set()
    for name, part in parts.items():
        for first, *words in part.commands:
            if first == "train":
                config = load(files.locate(words[0]), words[1:])
            else:
                options = parse(*words)
                config = load(files.locate(options.run), options.overrides)
            paths.add(config.model.path)
            assert config.rollout.vllm or name == "learner"
    assert paths == {"/m", "/l", "/r"}
