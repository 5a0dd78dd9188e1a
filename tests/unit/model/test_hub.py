"""Models of the hub, through its own client, from a stand-in of the hub on this machine."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import close_session

from longtail.errors import ConfigError
from longtail.model.hf.model import load_config, save_model
from longtail.model.hf.tokenizer import load_tokenizer
from longtail.model.sources.hub import is_hub_id, resolve
from support.fake_hub import COMMIT, FakeHub, serve, use
from support.tiny_models import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Files of a repository: a model, and what is never fetched."""
    folder = tmp_path_factory.mktemp("repository")
    save_model(tiny_model(), folder, eos_ids=(1,))
    tiny_tokenizer().save(folder)
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
