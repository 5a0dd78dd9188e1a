import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from longtail.config import files as configfile
from longtail.config.rl import RunConfig, load
from longtail.config.sft import SftConfig
from longtail.errors import CheckpointError, ConfigError
from longtail.run import state_file
from longtail.run.checkpoint import Checkpoint, RunDirectory, policy_directory
from longtail.system import files, tensor_files

CONFIG = configfile.render(RunConfig())


def _policy(content: str = "{}") -> Callable[[Path], None]:
    def save(path: Path) -> None:
        (path / "config.json").write_text(content)

    return save


def _save(run: RunDirectory, step: int) -> None:
    run.save(
        step, _policy(f'{{"step": {step}}}'), {"w": torch.full((3,), float(step))}, {"n": step}
    )


def _latest(run: RunDirectory) -> Checkpoint:
    latest = run.load_latest()
    assert latest is not None
    return latest


def _names(run: RunDirectory) -> list[str]:
    return sorted(path.name for path in run.checkpoints.iterdir())


def _bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.reshape(-1).contiguous().view(torch.uint8).tolist())


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    with RunDirectory(tmp_path / "run", keep=2) as directory:
        assert directory.start(CONFIG, resume=True) is None
        yield directory


def test_a_checkpoint_is_restored_exactly(run):
    whole = torch.arange(12.0).reshape(3, 4)
    tensors = {
        "double": torch.tensor([0.1, -0.0, 5e-324, 1.7e308], dtype=torch.float64),
        "half": torch.tensor([1.0, 3.14], dtype=torch.bfloat16),
        "bytes": torch.get_rng_state(),
        "scalar": torch.tensor(7, dtype=torch.int64),
        "transposed": whole[:1].T,
        "view": whole[1:, 1:],
    }
    state = {"cursor": 2**70, "loss": 0.1 + 0.2, "ids": ["a", "ü"], "nested": {"none": None}}
    run.save(3, _policy(), tensors, state)
    loaded = _latest(run)
    assert (loaded.step, loaded.state) == (3, state)
    back = loaded.tensors()
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype
        assert _bits(back[name]) == _bits(tensor)


def test_the_newest_of_several_checkpoints_is_loaded_and_the_oldest_is_removed(run):
    def interrupt(path: Path) -> None:
        raise KeyboardInterrupt

    for step in (5, 10, 1_000_000):
        _save(run, step)
    with pytest.raises(KeyboardInterrupt):
        run.save(1_000_001, interrupt, {}, {})
    assert _names(run) == ["step_000010", "step_1000000"]
    latest = _latest(run)
    assert latest.step == 1_000_000
    assert json.loads((latest.policy / "config.json").read_text()) == {"step": 1_000_000}


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def _zero(file: Path) -> None:
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[: max(size - 4096, size // 2)].ljust(size, b"\0"))


def _shorten(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def _exchange(file: Path) -> None:
    shutil.copy(str(file).replace("step_000002", "step_000001"), file)


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        *((each, "trainer.safetensors") for each in (_flip, _zero, _shorten, _exchange)),
        *((_flip, "state.json"), (_exchange, "policy/config.json"), (Path.unlink, "state.json")),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_in_one_sentence(run, caplog, damage, name):
    _save(run, 1)
    _save(run, 2)
    newest = run.checkpoints / "step_000002"
    damage(newest / name)
    (newest / name).with_suffix(".left-by-someone").write_text("whatever")
    run.close()
    with RunDirectory(run.path, keep=1) as again:
        latest = again.start(CONFIG, resume=True)
        assert latest is not None
        assert (latest.step, latest.state, len(caplog.records)) == (1, {"n": 1}, 1)
        assert f"{newest} is damaged (" in caplog.text
        assert name in caplog.text or name == "state.json"
        assert "; the checkpoint of step 1 is taken" in caplog.text
        _save(again, 2)  # the damaged one goes
        assert _latest(again).state == {"n": 2}
    (newest / "policy" / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"is damaged \(policy/config.json .* put one back"):
        again.load_latest()


def test_a_damaged_later_checkpoint_does_not_outlive_the_next_one(run):
    for step in (2, 4):
        _save(run, step)
    _flip(run.checkpoints / "step_000004" / "trainer.safetensors")
    assert _latest(run).step == 2
    _save(run, 3)
    assert _names(run) == ["step_000002", "step_000003"]


EDITS = ({"sha256": "0" * 64}, {"files": {}}, {"state": []}, "[]", "NaN", "\xff", "[" * 100_000)


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_state_is_damaged(run, edit):
    _save(run, 1)
    file = run.checkpoints / "step_000001" / "state.json"
    if not isinstance(edit, str):
        edit = json.dumps(json.loads(file.read_text()) | edit)
    file.write_text(edit, encoding="latin-1")
    with pytest.raises(CheckpointError, match=r"step_000001 is damaged \(.*state.json"):
        run.load_latest()


def test_a_reader_of_the_policy_needs_the_policy_alone(run, caplog):
    _save(run, 1)
    _save(run, 2)
    first, newest = (run.checkpoints / f"step_00000{step}" / "policy" for step in (1, 2))
    (newest.parent / "trainer.safetensors").unlink()
    assert policy_directory(run.path) == newest
    _exchange(newest / "config.json")
    assert policy_directory(run.path) == first
    assert f"{newest.parent} is damaged (policy/config.json" in caplog.text
    for named in (newest, newest.parent):
        with pytest.raises(CheckpointError, match=r"is damaged \(policy/config.json"):
            policy_directory(named)


def test_nothing_of_a_resumed_run_is_written_before_it_goes_on(run):
    _save(run, 4)
    left = run.checkpoints / ".new-step_000005"
    left.mkdir()
    before = {path: path.is_file() and path.read_bytes() for path in run.path.rglob("*")}
    run.close()
    longer = configfile.render(load(None, ["--run.steps=7"]))
    with RunDirectory(run.path) as again:
        assert again.start(longer, resume=True) is not None
        assert {path: path.is_file() and path.read_bytes() for path in before} == before
        again.write_config()
    assert (run.path / "config.toml").read_text() == longer
    assert not left.exists()


class _Killed(BaseException):
    """The process ends here: nothing is cleaned up."""


def _mortal(real: Callable[..., Any], left: Iterator[int]) -> Callable[..., Any]:
    """Return a function that raises as soon as no calls are left."""

    def call(*words: Any, **more: Any) -> Any:
        if next(left) >= 0:
            raise _Killed
        return real(*words, **more)

    return call


def test_a_run_that_is_killed_anywhere_in_a_save_resumes(tmp_path, monkeypatch):
    places = [
        (files, "sync"), (files, "sync_folder"), (tensor_files, "save"),
        (Path, "rename"), (Path, "mkdir"), (shutil, "rmtree"), (state_file, "digest"),
    ]  # fmt: skip
    for kill_at in itertools.count():
        run, left = RunDirectory(tmp_path / str(kill_at), keep=2), itertools.count(-kill_at)
        run.start(CONFIG, resume=True)
        for step in (1, 2):
            _save(run, step)
        with monkeypatch.context() as patch:
            for place, name in places:
                patch.setattr(place, name, _mortal(getattr(place, name), left))
            is_alive = True
            try:
                _save(run, 3)
            except _Killed:
                is_alive = False
        run.close()
        with RunDirectory(run.path, keep=2) as again:
            latest = again.start(CONFIG, resume=True)
            assert latest is not None
            assert latest.step in (2, 3)
            assert latest.state == {"n": latest.step}
            assert latest.tensors()["w"].tolist() == [latest.step] * 3
            again.write_config()
            for step in range(latest.step + 1, 6):
                _save(again, step)
            assert _names(again) == ["step_000004", "step_000005"]
        if is_alive:
            break
    assert kill_at > len(places)


def test_a_run_of_another_version_is_refused_and_left_as_it_is(run):
    folder = run.checkpoints / "step_000004"
    (folder / "policy").mkdir(parents=True)
    (folder / "policy" / "config.json").write_text("{}")
    (folder / "state.json").write_text('{"step": 4, "state": {}}')  # as before run_format
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    run.close()
    with pytest.raises(ConfigError, match=r"another version of longtail.*give another run\.dir"):
        RunDirectory(run.path).start(CONFIG, resume=True)
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before
    assert policy_directory(run.path) == folder / "policy"


def test_a_used_directory_is_refused_when_resume_is_off(run):
    (run.path / "metrics.jsonl").write_text('{"step": 1}\n')
    run.close()
    with pytest.raises(ConfigError, match=r"holds an earlier run.*run\.resume = true"):
        RunDirectory(run.path).start(CONFIG, resume=False)


def test_an_unused_directory_is_accepted_when_resume_is_off(tmp_path):
    place = tmp_path / "a" / "b"
    for _ in range(2):
        with RunDirectory(place) as run:
            assert run.load_latest() is None
            assert run.start(CONFIG, resume=False) is None
        (place / "metrics.jsonl").write_text("")  # empty logs are no run
    assert (place / "config.toml").read_text() == CONFIG
    changed = configfile.render(load(None, ["--learner.loss=dapo"]))
    assert RunDirectory(place).start(changed, resume=True) is None, "nothing is changed yet"


def test_a_configuration_that_changes_the_run_is_refused_with_the_fields(run):
    _save(run, 4)
    run.close()
    changed = configfile.render(
        load(None, ["--learner.loss=dapo", "--learner.clip_low=0.1", "--run.threads=1"])
    )
    with pytest.raises(ConfigError) as caught:
        RunDirectory(run.path).start(changed, resume=True)
    message = str(caught.value)
    assert "learner.loss: 'grpo' -> 'dapo'" in message
    assert "learner.clip_low: None -> 0.1" in message
    assert "run.threads" not in message
    assert (run.path / "config.toml").read_text() == CONFIG


def test_fields_without_effect_on_weights_may_change(run):
    _save(run, 4)
    run.close()
    words = ["--run.steps=7", "--run.threads=1", "--run.keep_checkpoints=9"]
    words += ["--cluster.workers=3", "--cluster.min_workers=1"]
    words += ["--learner.streaming=true", "--run.writers=tensorboard"]
    changed = configfile.render(load(None, words))
    assert RunDirectory(run.path).start(changed, resume=True) is not None


@pytest.mark.parametrize(
    ("config", "word", "message"),
    [
        (load(None, ["--learner.schedule=linear"]), "--run.steps=200", r"run\.steps: 100 -> 200"),
        (SftConfig(), "--train.steps=999", r"train\.steps: 400 -> 999"),
    ],
)
def test_the_number_of_steps_may_not_change_under_a_schedule(tmp_path, config, word, message):
    (tmp_path / "run.toml").write_text(configfile.render(config))
    with RunDirectory(tmp_path / "run") as run:
        run.start(configfile.render(config), resume=True)
        _save(run, 4)
    longer = configfile.resolve(type(config), tmp_path / "run.toml", [word])
    with pytest.raises(ConfigError, match=message):
        RunDirectory(tmp_path / "run").start(configfile.render(longer), resume=True)


@pytest.mark.slow
def test_two_processes_do_not_share_a_run_directory(run):
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from longtail.run.checkpoint import RunDirectory\n"
        "from longtail.errors import ConfigError\n"
        "try: RunDirectory(Path(sys.argv[1])).start('', resume=True)\n"
        "except ConfigError as error: print(error)\n"
    )
    command = [sys.executable, "-c", script, str(run.path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "another process is running in it" in done.stdout
    run.close()
    RunDirectory(run.path).start("", resume=True)


def test_a_policy_is_found_in_a_model_a_checkpoint_and_a_run(run):
    _save(run, 1)
    _save(run, 2)
    newest = run.checkpoints / "step_000002"
    for path in (run.path, newest, newest / "policy"):
        assert policy_directory(path) == newest / "policy"
    assert policy_directory(run.checkpoints / "step_000001").parent.name == "step_000001"


def test_a_path_without_a_policy_is_refused_with_the_alternatives(tmp_path):
    with pytest.raises(ConfigError, match="no such directory; give a Hugging Face directory"):
        policy_directory(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="neither a model nor a run"):
        policy_directory(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run\.dir = .*file.* cannot be written"):
        RunDirectory(tmp_path / "file").start(CONFIG, resume=True)
