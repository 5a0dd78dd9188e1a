"""The drafter on disk: written before its checkpoint, whole or not at all, found again by step."""

from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from longtail.assembly.drafters import Target, located
from longtail.cluster.group import WorkerGroup
from longtail.cluster.work.drafter_versions import DrafterState
from longtail.drafter.formats.checkpoint import LoadedDrafter
from longtail.errors import CheckpointError, ConfigError
from longtail.rl.data.prompts import PromptSource
from longtail.run.checkpoint import RunDirectory
from longtail.run.drafter_store import INITIAL, DrafterStore, load_run_drafter, run_drafters
from longtail.run.state import StateSaver, TrainerState
from support.published import RECORD, our_drafter
from support.tiny_models import tiny_model, tiny_tokenizer


def state(version: int) -> DrafterState:
    return DrafterState(
        tensors={"drafter/fc.weight": torch.full((3, 2), float(version))},
        numbers={"version": version, "buffer": {"step": version}, "lengths": {}},
    )


def kept(path: Path) -> list[str]:
    return sorted(each.name for each in path.iterdir())


def test_the_newest_that_is_not_younger_than_the_checkpoint_comes_back(tmp_path):
    store = DrafterStore(tmp_path / "drafter", keep=2)
    for step in (1, 2, 3):
        store.save(step, state(step))
    assert kept(tmp_path / "drafter") == ["step_000002", "step_000003"]
    for step, version in ((9, 3), (3, 3), (2, 2)):
        found = store.load(step)
        assert found is not None
        assert found.numbers == state(version).numbers
        assert found.tensors["drafter/fc.weight"].tolist() == [[version] * 2] * 3
    assert store.load(1) is None
    assert DrafterStore(tmp_path / "none").load(5) is None


def test_a_disk_that_refuses_is_told(tmp_path):
    (tmp_path / "drafter").write_text("a file in the way")
    store = DrafterStore(tmp_path / "drafter")
    with pytest.raises(CheckpointError, match=r"the drafter cannot be written .* free some space"):
        store.save(1, state(1))


@pytest.fixture
def run(tmp_path: Path) -> tuple[Path, Target]:
    """A run that began with a drafter and published another in step 4."""
    model, tokenizer = tiny_model(), tiny_tokenizer()
    target = Target(model=model, tokenizer=tokenizer, directory=tmp_path, name=str(tmp_path / "r"))
    loaded = our_drafter(model, tokenizer, layers=(0, 1))
    loaded.save(tmp_path / "r" / "drafter" / INITIAL)
    store = DrafterStore(tmp_path / "r" / "drafter")
    for step, version in ((2, 0), (4, 3)):
        tensors = {f"drafter/{n}": t + version for n, t in loaded.layer.state_dict().items()}
        numbers = {"version": version, "accept_len": 2.5 if version else None}
        store.save(step, DrafterState(tensors=tensors, numbers=numbers))
    return tmp_path / "r", target


def norm_of(path: Path, target: Target) -> tuple[float, LoadedDrafter]:
    loaded = load_run_drafter(path, target.model, target.tokenizer, dtype=None)
    return loaded.layer.norm.weight[0].item(), loaded


def test_a_run_means_its_newest_drafter_and_a_step_its_own(run):
    path, target = run
    first, initial = norm_of(path / "drafter" / INITIAL, target)
    assert norm_of(path / "drafter" / "step_000002", target)[0] == first
    for place in (path, path / "drafter", path / "drafter" / "step_000004"):
        value, newest = norm_of(place, target)
        assert value == pytest.approx(first + 3)
        assert newest.layer.config == initial.layer.config
        assert run_drafters(place) == path / "drafter"
        assert located(str(place)) == (str(max(place, path / "drafter")), path / "drafter")
    assert run_drafters(path.parent) is None


def test_what_a_run_taught_its_drafter_is_said_and_what_was_true_before_is_not(run):
    path, target = run
    _, initial = norm_of(path / "drafter" / INITIAL, target)
    assert initial.training == RECORD
    _, newest = norm_of(path, target)
    assert newest.trained_on.name == "here, then the policy of r (version 3)"
    assert newest.training.accept_len == 2.5
    assert newest.training.overlap == ()


def test_a_run_with_weights_of_another_drafter_is_refused(run):
    path, target = run
    tensors = {"drafter/fc.weight": torch.ones(2, 2)}
    store = DrafterStore(path / "drafter")
    store.save(9, DrafterState(tensors=tensors, numbers={"version": 1}))
    with pytest.raises(ConfigError, match=r"another drafter.*initial, the drafter that the run"):
        norm_of(path, target)


def test_a_resumed_run_goes_on_without_the_state_of_another_drafter_and_says_so(tmp_path, caplog):
    workers = Mock(spec=WorkerGroup)
    workers.drafter = object()
    workers.restore_drafter.side_effect = CheckpointError("the drafter's state is another one's")
    run, fresh = RunDirectory(tmp_path), TrainerState(step=0, cursor={}, seconds=0.0, threads=1)
    DrafterStore(tmp_path / "drafter").save(2, state(1))
    run.save(2, lambda _: None, {}, {"cursor": {}, "seconds": 1.0, "threads": 1, "learner": {}})
    with caplog.at_level("WARNING", logger="longtail"):
        saver = StateSaver(run, workers, Mock(spec=PromptSource), keep=2)
        restored = saver.begin(run.load_latest(), fresh)
        saver.begin_writing()
    assert restored.step == 2
    (said,) = caplog.messages
    assert "another one's; the run goes on with its first drafter" in said
