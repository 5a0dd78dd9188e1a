"""What a resumed run does with a drafter's state that is another one's."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import torch

from longtail.cluster.group import WorkerGroup
from longtail.cluster.work.drafter_versions import DrafterState
from longtail.errors import CheckpointError
from longtail.rl.data.prompts import PromptSource
from longtail.run.checkpoint import RunDirectory
from longtail.run.drafter_store import DrafterStore
from longtail.run.state import StateSaver, TrainerState


def test_the_run_goes_on_without_it_and_says_so(tmp_path: Path, caplog: Any) -> None:
    workers = Mock(spec=WorkerGroup)
    workers.drafter = object()
    workers.restore_drafter.side_effect = CheckpointError("the drafter's state is another one's")
    run, fresh = RunDirectory(tmp_path), TrainerState(step=0, cursor={}, seconds=0.0, threads=1)
    DrafterStore(tmp_path / "drafter").save(
        2, DrafterState(tensors={"w": torch.ones(1)}, numbers={})
    )
    run.save(2, lambda _: None, {}, {"cursor": {}, "seconds": 1.0, "threads": 1, "learner": {}})
    with caplog.at_level("WARNING", logger="longtail"):
        saver = StateSaver(run, workers, Mock(spec=PromptSource), keep=2)
        restored = saver.begin(run.load_latest(), fresh)
        saver.begin_writing()
    assert restored.step == 2
    (said,) = caplog.messages
    assert "another one's; the run goes on with its first drafter" in said
