"""The drafter on disk: written beside the run, whole or not at all, found again by step."""

import json
from pathlib import Path

import pytest
import torch

from longtail.cluster.fleet import DrafterState
from longtail.drafter_store import DrafterStore
from longtail.errors import CheckpointError


def state(version: int) -> DrafterState:
    return DrafterState(
        tensors={"drafter/fc.weight": torch.full((3, 2), float(version))},
        numbers={"version": version, "buffer": {"step": version}, "lengths": {}},
    )


def kept(path: Path) -> list[str]:
    return sorted(each.name for each in path.iterdir())


def test_the_newest_that_is_not_younger_than_the_checkpoint_comes_back(tmp_path: Path) -> None:
    store = DrafterStore(tmp_path / "drafter", keep=2)
    for step in (1, 2, 3):
        store.save(step, state(step))
    store.wait()
    assert kept(tmp_path / "drafter") == ["step_000002", "step_000003"]
    for step, version in ((9, 3), (3, 3), (2, 2)):
        found = store.load(step)
        assert found is not None
        assert found.numbers == state(version).numbers
        assert found.tensors["drafter/fc.weight"].tolist() == [[version] * 2] * 3
    assert store.load(1) is None
    assert DrafterStore(tmp_path / "none").load(5) is None


@pytest.mark.parametrize("damage", ["tensors.safetensors", "state.json"])
def test_a_damaged_one_is_passed_over(tmp_path: Path, damage: str) -> None:
    store = DrafterStore(tmp_path)
    for step in (1, 2):
        store.save(step, state(step))
    store.wait()
    with (tmp_path / "step_000002" / damage).open("r+b") as file:
        file.seek(5)
        file.write(b"\xff\xff\xff")
    found = store.load(2)
    assert found is not None
    assert found.numbers["version"] == 1


def test_what_was_half_written_is_no_drafter(tmp_path: Path) -> None:
    torn = tmp_path / ".new-step_000004"
    torn.mkdir()
    (torn / "state.json").write_text(json.dumps({"numbers": {}}))
    store = DrafterStore(tmp_path)
    assert store.load(9) is None
    store.save(4, state(4))
    store.wait()
    assert kept(tmp_path) == ["step_000004"]


def test_a_disk_that_refuses_is_told_at_the_next_call(tmp_path: Path) -> None:
    (tmp_path / "drafter").write_text("a file in the way")
    store = DrafterStore(tmp_path / "drafter")
    store.save(1, state(1))
    with pytest.raises(CheckpointError, match=r"the drafter cannot be written .* free some space"):
        store.wait()
    store.wait()  # told once
