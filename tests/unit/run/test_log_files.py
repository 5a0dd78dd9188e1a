import errno
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from end_to_end.workshop import read_lines
from longtail.cluster.records import RolloutResult, ShardResult, TaskResult
from longtail.config.rl import RunSection, load
from longtail.engine.report import RolloutReport
from longtail.engine.rollout_log import TRAINING, RolloutSeries
from longtail.errors import CheckpointError, ConfigError
from longtail.generator import Switch
from longtail.rl.grading.pool import Graded
from longtail.rl.learner_metrics import LearnerMetrics
from longtail.run.log_files import RunLogger
from longtail.run.metrics_log import JsonLines, MetricLog
from longtail.run.step_metrics import SampleRound, StepRecord
from longtail.types import Prompt, Rollout
from support.rollouts import completion

ROLLOUT = Rollout(
    prompt=Prompt(prompt_id="p", tokens=(1,), text="?"),
    completion=completion("p@0#0", (5, 1), text="42", policy_version=3),
    reward=1.0,
)

SERIES = RolloutSeries(
    seconds=[0.004, 0.003],
    running=[8, 8],
    drafts=[0, 8],
    nodes=[0, 19],
    accepted=[0, 11],
    switches=[(1, Switch(drafts=True, reason="it pays"))],
)


def _record(
    *rollouts: Rollout,
    series: RolloutSeries | None = None,
    drafted: Mapping[str, tuple[int, ...]] | None = None,
) -> StepRecord:
    """Return the records of a step of one worker."""
    report = RolloutReport()
    shard = ShardResult(completions=(), report=report, series=series, drafted=drafted or {})
    shards = (TaskResult(worker=0, result=shard),)
    rollout = RolloutResult(completions=(), shards=shards, spots=(), seconds=1.0)
    graded = Graded(rollouts=rollouts, failures=())
    return StepRecord(
        rounds=[SampleRound(num_prompts=1, rollout=rollout, graded=graded)],
        num_learned=0,
        learned=LearnerMetrics().report(1, []),
        seconds={},
    )


def _written(directory: Path, *words: str, steps: int = 1, **more: Any) -> None:
    """Write some steps of a run."""
    logger = RunLogger(load(None, words).run, directory, last_step=None, shown={})
    for step in range(1, steps + 1):
        logger.write(step, {"reward/mean": 0.5}, _record(ROLLOUT, **more))
    logger.close()


def test_a_step_writes_one_line_of_metrics_and_one_per_rollout(tmp_path):
    _written(tmp_path)
    assert read_lines(tmp_path / "metrics.jsonl") == [{"step": 1, "reward/mean": 0.5}]
    (row,) = read_lines(tmp_path / "rollouts.jsonl")
    assert row == {
        "step": 1,
        "prompt_id": "p",
        "request_id": "p@0#0",
        "policy_version": 3,
        "reward": 1.0,
        "num_tokens": 2,
        "finish_reason": "stop",
        "logprob": -1.0,
        "prompt": "?",
        "text": "42",
    }
    _written(tmp_path / "b", "--run.save_rollouts=false")
    assert read_lines(tmp_path / "b" / "rollouts.jsonl") == []


def test_drafted_characters_stand_apart_from_the_texts(tmp_path):
    for directory, drafted in (("a", {}), ("b", {"p@0#0": (0, 2)})):
        _written(tmp_path / directory, series=SERIES, drafted=drafted)
    assert read_lines(tmp_path / "b" / "drafts.jsonl") == [
        {"step": 1, "drafted": {"p@0#0": [0, 2]}}
    ]
    texts = [(tmp_path / directory / "rollouts.jsonl").read_bytes() for directory in "ab"]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(("last_step", "kept"), [(None, [4]), (1, [1, 4]), (9, [1, 2, 3, 4])])
def test_a_resumed_run_drops_the_lines_after_its_checkpoint(tmp_path, last_step, kept):
    _written(tmp_path, steps=3, series=SERIES)
    series = SERIES.line(TRAINING, 0)
    lines = read_lines(tmp_path / "speculation.jsonl")
    assert lines == [{"step": step, **series} for step in (1, 2, 3)]
    with (tmp_path / "speculation.jsonl").open("a") as file:
        file.write('{"step": 4, "seconds": [0.0')  # killed while writing
    resumed = RunLogger(RunSection(), tmp_path, last_step=last_step, shown={})
    resumed.write(4, {}, _record(ROLLOUT, series=SERIES))
    resumed.close()
    for name in ("metrics.jsonl", "rollouts.jsonl", "speculation.jsonl"):
        assert [line["step"] for line in read_lines(tmp_path / name)] == kept


def test_a_line_can_be_read_while_the_file_is_open_and_odd_values_are_written(tmp_path):
    text, nan, inf = "\ud83d and ü", float("nan"), float("inf")
    path = tmp_path / "m.jsonl"
    lines = JsonLines(path)
    lines.write(1, {"a": 0.5, "text": text, "b": nan, "c": [1.0, -inf], "d": {"e": inf}})
    row = {"step": 1, "a": 0.5, "text": text, "b": None, "c": [1.0, None], "d": {"e": None}}
    assert json.loads(path.read_bytes()) == row
    lines.close()
    JsonLines(path).close()
    assert path.read_text() == "", "a new run starts a new file"
    os.mkfifo(tmp_path / "pipe")
    JsonLines(tmp_path / "pipe", last_step=1).close()
    assert (tmp_path / "pipe").is_file()
    (tmp_path / "folder").mkdir()
    with pytest.raises(CheckpointError, match=r"folder \(Is a directory\)"):
        JsonLines(tmp_path / "folder")


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path):
    lines = JsonLines(tmp_path / "metrics.jsonl")
    lines.close()
    for written in (OSError(errno.ENOSPC, "No space left on device"), 7):
        lines._file = Mock(write=Mock(side_effect=[written]))
        with pytest.raises(CheckpointError, match=r"metrics\.jsonl .* free some space"):
            lines.write(1, {"x": 1.0})


def test_tensorboard_gets_the_same_metrics(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = MetricLog(["tensorboard"], tmp_path, last_step=None, config={})
    writer.write(1, {"reward/mean": 0.25})
    writer.write(2, {"reward/mean": 0.5})
    writer.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5)]
    assert [row["step"] for row in read_lines(tmp_path / "metrics.jsonl")] == [1, 2]


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_writer_that_is_not_installed_is_named_with_the_command(tmp_path, monkeypatch, name):
    module = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}[name]
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    with pytest.raises(ConfigError, match=rf"'{name}'.*pip install .*longtail|\[{name}\]"):
        MetricLog([name], tmp_path, last_step=None, config={})
