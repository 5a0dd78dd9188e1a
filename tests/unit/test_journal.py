import json
from pathlib import Path

import pytest

from longtail.config import RunConfig, RunSection
from longtail.journal import Journal
from longtail.types import Completion, FinishReason, Prompt, Rollout

COMPLETION = Completion(
    request_id="p@0#0",
    tokens=(5, 1),
    logprobs=(-0.25, -0.5),
    text="42",
    finish_reason=FinishReason.STOP,
    policy_version=3,
)
ROLLOUT = Rollout(
    prompt=Prompt(prompt_id="p", tokens=(1,), text="?"), completion=COMPLETION, reward=1.0
)


def _lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_step_leaves_one_line_of_metrics_and_one_for_each_rollout(tmp_path: Path) -> None:
    journal = Journal(RunConfig(), tmp_path, last_step=None)
    journal.write(1, {"reward/mean": 0.5}, [ROLLOUT, ROLLOUT])
    journal.close()
    assert _lines(tmp_path / "metrics.jsonl") == [{"step": 1, "reward/mean": 0.5}]
    first, second = _lines(tmp_path / "rollouts.jsonl")
    assert first == second
    assert first == {
        "step": 1,
        "prompt_id": "p",
        "request_id": "p@0#0",
        "policy_version": 3,
        "reward": 1.0,
        "num_tokens": 2,
        "finish_reason": "stop",
        "logprob": -0.75,
        "text": "42",
    }


def test_rollouts_are_left_out_when_they_are_not_wanted(tmp_path: Path) -> None:
    config = RunConfig(run=RunSection(save_rollouts=False))
    journal = Journal(config, tmp_path, last_step=None)
    journal.write(1, {}, [ROLLOUT])
    journal.close()
    assert _lines(tmp_path / "rollouts.jsonl") == []
    assert len(_lines(tmp_path / "metrics.jsonl")) == 1


@pytest.mark.parametrize(("last_step", "kept"), [(None, [4]), (1, [1, 4]), (9, [1, 2, 3, 4])])
def test_a_resumed_run_goes_on_after_its_checkpoint(
    tmp_path: Path, last_step: int | None, kept: list[int]
) -> None:
    journal = Journal(RunConfig(), tmp_path, last_step=None)
    for step in (1, 2, 3):
        journal.write(step, {}, [ROLLOUT])
    journal.close()
    resumed = Journal(RunConfig(), tmp_path, last_step=last_step)
    resumed.write(4, {}, [ROLLOUT])
    resumed.close()
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        assert [line["step"] for line in _lines(tmp_path / name)] == kept
