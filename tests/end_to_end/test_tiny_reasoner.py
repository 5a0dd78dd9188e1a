"""The built-in model: RL from its shipped weights, generation."""

from pathlib import Path

import pytest

from end_to_end.workshop import Workshop, say
from longtail.model.hf.model import load_config
from longtail.tiny import REASONER


@pytest.mark.slow
def test_the_tiny_reasoner_is_trained_on_its_own_task_with_its_own_reward(tmp_path: Path) -> None:
    run = Workshop(path=tmp_path)
    said = say(
        "train",
        "tiny",
        f"--run.dir={tmp_path / 'run'}",
        "--run.steps=2",
        "--run.threads=1",
        "--cluster.workers=1",  # test_cluster.py runs two
        "--data.size=8",
        "--data.heldout_size=2",
        "--rollout.prompts_per_step=2",
        "--rollout.group_size=2",
        "--rollout.max_tokens=24",
    )
    assert said.code == 0, said.err
    rows = run.metrics("run")
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["reward/failures"] == 0 for row in rows)
    assert all(0 <= row["reward/mean"] <= 1 for row in rows)
    assert run.summary("run")["reward_before"] is not None
    assert load_config(run.policy("run", 2)) == load_config(REASONER)
    answered = say("generate", str(tmp_path / "run"), "--prompt=2 + 2", "--max-tokens=8")
    assert answered.code == 0, answered.err
