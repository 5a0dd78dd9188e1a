"""What the arms of `longtail bench e2e --switch-task N` train on: in mid-run the task changes.

    until step N - 1    How many steps from 27 to 1?        as the tiny reasoner was taught
    from step N on      Let me count each step from 27      the same problems, in words of its own
                                                            answers, which it was never asked in

It answers the latter shortly, in forms that its drafter was not taught, and now and then by a
walk, which is rewarded: so there is something new to learn for both.
"""

import json
from pathlib import Path

from longtail.bench.e2e.options import Setting
from longtail.rl.data import tiny_task as task

_WORDING = "Let me count each step from {}"


def write_prompts(directory: Path, setting: Setting) -> Path:
    """Write the problems of all steps, in order, as a source of prompts; return the file.

    They are those that the run would draw itself, of the same names: up to the switch, a run from
    this file is the run without it.
    """
    assert setting.switch_step is not None, "without a switch the run draws them itself"
    rows = task.problems(setting.prompts * setting.steps, 0, "train")
    for row in rows[setting.prompts * (setting.switch_step - 1) :]:
        start = row["problem_id"].split("/")[1]
        row["prompt"] = [{"role": "user", "content": _WORDING.format(start)}]
    path = directory / "tiny-reasoner.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
