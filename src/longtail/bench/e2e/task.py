"""Prompts of `longtail bench e2e --switch-task N`: the task changes in the middle of the run.

    until step N - 1    How many steps from 27 to 1?        as the tiny reasoner was trained
    from step N on      Let me count each step from 27      the same problems in the words of its
                                                            own answers, which no prompt used before

The model answers the new prompts shortly, in forms that its drafter was not trained on, and
sometimes with a walk, which is rewarded: so both have something new to learn.
"""

import json
from pathlib import Path

from longtail.bench.e2e.options import E2eBenchOptions
from longtail.rl.data import tiny_task as task

_WORDING = "Let me count each step from {}"


def write_prompts(directory: Path, options: E2eBenchOptions) -> Path:
    """Write the problems of all steps, in order, as a source of prompts; return the file.

    They are the problems that the run would draw itself, with the same names: up to the switch, a
    run with this file is the run without it.
    """
    assert options.switch_task is not None, "without a switch the run draws the problems itself"
    rows = task.problems(options.prompts * options.steps, 0, "train")
    for row in rows[options.prompts * (options.switch_task - 1) :]:
        start = row["problem_id"].split("/")[1]
        row["prompt"] = [{"role": "user", "content": _WORDING.format(start)}]
    path = directory / "tiny-reasoner.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
