"""What `auto` stands for: by processor, after a resume, and what is said of the choice."""

from pathlib import Path

import pytest
import torch

from longtail.assembly import precision
from longtail.config import drafter, files, rl, sft
from longtail.model.kernels import native
from longtail.run.checkpoint import RunDirectory

MACHINES = {
    "hardware": ("pairs", True, "bfloat16", True),
    "native": ("halves", False, "bfloat16", False),
    "onednn": (None, True, "bfloat16", True),
    "neither": (None, False, "float32", False),
}
"""Layout of native products, whether bfloat16 is multiplied, and what `auto` is."""


@pytest.fixture
def be(monkeypatch: pytest.MonkeyPatch):
    def become(machine: str) -> None:
        layout, multiplies, *_ = MACHINES[machine]
        found = {torch.bfloat16: layout, torch.float32: layout and "inputs"}
        monkeypatch.setattr(native, "layout", found.get)
        monkeypatch.setattr(precision, "multiplies_bfloat16", lambda device: multiplies)

    return become


def train(place: Path, *words: str) -> rl.RunConfig:
    return rl.load(None, [f"--run.dir={place}", "--run.device=cpu", *words])


def choice(config: rl.RunConfig) -> tuple[str, object]:
    return config.rollout.dtype, config.learner.autocast


@pytest.mark.parametrize("machine", MACHINES)
def test_auto_is_what_is_fast_here(machine, be, tmp_path) -> None:
    be(machine)
    *_, dtype, autocast = MACHINES[machine]
    config = precision.decided(train(tmp_path))
    assert choice(config) == (dtype, autocast)
    assert precision.costs(config) == []
    assert precision.decided(config) == config
    words = [f"--run.dir={tmp_path}", "--run.device=cpu"]
    tuned = precision.decided(files.resolve(sft.SftConfig, None, words))
    assert tuned.train.autocast is autocast
    trained = precision.decided(files.resolve(drafter.DrafterTrainConfig, None, words))
    assert (trained.target.dtype, trained.train.autocast) == (dtype, autocast)


def test_the_reference_in_float64_has_no_autocast(be, tmp_path) -> None:
    be("hardware")
    exact = train(tmp_path, "--learner.dtype=float64", "--rollout.dtype=float64")
    assert choice(precision.decided(exact)) == ("float64", False)
    words = ["--target.dtype=float64", f"--run.dir={tmp_path}"]
    trained = precision.decided(files.resolve(drafter.DrafterTrainConfig, None, words))
    assert trained.train.autocast is False


def test_what_is_named_stays_and_one_line_says_what_it_costs(be, tmp_path) -> None:
    be("neither")
    named = train(tmp_path, "--rollout.dtype=bfloat16", "--learner.autocast=true")
    assert precision.decided(named) == named
    rollouts, learning = precision.costs(named)
    assert rollouts.startswith("rollout.dtype = bfloat16: ")
    assert "12 times as long" in learning
    assert all("use auto" in line for line in (rollouts, learning))


def test_a_resumed_run_keeps_what_it_was_begun_with(be, tmp_path) -> None:
    be("hardware")
    begun = precision.decided(train(tmp_path))
    with RunDirectory(tmp_path) as run:
        run.start(files.render(begun), resume=True)
    be("neither")
    assert choice(precision.decided(train(tmp_path))) == ("float32", False), "nothing to resume"
    with RunDirectory(tmp_path) as run:
        run.start(files.render(begun), resume=True)
        run.save(1, lambda path: None, {}, {})
    resumed = precision.decided(train(tmp_path))
    assert choice(resumed) == choice(begun) == ("bfloat16", True)
    assert len(precision.costs(resumed)) == 2
    with RunDirectory(tmp_path) as run:
        assert run.start(files.render(resumed), resume=True) is not None
    assert choice(precision.decided(train(tmp_path, "--run.resume=false"))) == ("float32", False)


def test_a_run_whose_texts_can_depend_on_their_batch_says_so(be, monkeypatch, tmp_path) -> None:
    be("native")
    assert precision.inexactness(precision.decided(train(tmp_path))) == []
    be("neither")
    config = precision.decided(train(tmp_path))
    monkeypatch.setenv("LONGTAIL_NATIVE", "0")
    (line,) = precision.inexactness(config)
    assert line.startswith("rollout.dtype = float32: ")
    assert "LONGTAIL_NATIVE=0 is set" in line
    assert precision.inexactness(train(tmp_path, "--rollout.dtype=float64")) == []


def test_a_run_on_a_gpu_builds_no_kernels_of_the_cpu_engine(monkeypatch, tmp_path) -> None:
    def built(*_: object) -> None:
        raise AssertionError("a kernel was asked for")

    monkeypatch.setattr(precision, "run_device", lambda config: torch.device("cuda"))
    monkeypatch.setattr(precision, "multiplies_bfloat16", lambda device: True)
    monkeypatch.setattr(native, "layout", built)
    monkeypatch.setattr(native, "_loaded", built)
    config = precision.decided(train(tmp_path))
    assert choice(config) == ("bfloat16", True)
    assert precision.costs(config) == []
    assert precision.inexactness(config) == [
        "on a GPU a text can depend on its batch at near-ties, hence on drafting"
    ]
