"""Training runs of `longtail bench gpu`: `longtail bench e2e` with one worker, on the GPU.

One worker is never idle while it writes, so its drafter learns after the rollout (arm `serial`).
"""

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from longtail.bench.e2e import card as e2e_card
from longtail.bench.e2e.arms import measure
from longtail.bench.e2e.options import add_arguments, read_setting

_REAL = ("--model=100m", "--dtype=bfloat16", "--steps=4")
_QUICK = ("--quick",)
_KEPT = ("model", "steps", "step_speedup", "rollout_speedup", "accept_length", "step_s")
_SAME = ("differing_share", "rewards_agree")


def training(device: str, say: Callable[[str], None], *, quick: bool) -> dict[str, Any]:
    """Train without drafts, with history, with the drafter as it is, and training it; in turn."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    arms = "--arms=off,history,frozen,serial"
    setting = read_setting(parser.parse_args([arms, "--workers=1", *(_QUICK if quick else _REAL)]))
    setting = replace(setting, words=(*setting.words, f"--run.device={device}"))
    with tempfile.TemporaryDirectory(prefix="longtail-gpu-") as place:
        found = measure(setting, Path(place), say)
    figures = e2e_card.as_json(setting, found)
    return {name: figures[name] for name in _KEPT + _SAME}
