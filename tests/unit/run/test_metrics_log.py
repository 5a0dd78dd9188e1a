import errno
import json
import os
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from longtail.errors import CheckpointError, ConfigError
from longtail.run.metrics_log import JsonLines, MetricLog


def _steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


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
    assert _steps(tmp_path / "metrics.jsonl") == [1, 2]


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_writer_that_is_not_installed_is_named_with_the_command(tmp_path, monkeypatch, name):
    module = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}[name]
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    with pytest.raises(ConfigError, match=rf"'{name}'.*pip install .*longtail|\[{name}\]"):
        MetricLog([name], tmp_path, last_step=None, config={})
