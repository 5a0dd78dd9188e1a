"""Model directories: saving and loading, and the errors of malformed ones."""

import json
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from longtail.errors import CheckpointError, ConfigError, UnsupportedModelError
from longtail.model.attention import PackedAttention
from longtail.model.hf.model import load_model, save_model, stored_dtype
from longtail.model.hf.tokenizer import load_tokenizer
from longtail.model.transformer import Transformer
from support.tiny_models import tiny_model, tiny_tokenizer

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def logits(model: Transformer) -> Tensor:
    tokens = torch.arange(20)
    with torch.no_grad():
        return model.logits(model(tokens, tokens, PackedAttention((0, 20))))


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def edit_weights(path: Path, changes: dict[str, Tensor | None]) -> None:
    tensors = {**load_file(path / WEIGHTS), **changes}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, path / WEIGHTS, metadata={"format": "pt"})


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_model(tiny_model("llama"), tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("field", "size"), [("vocab_size", 2_000_000_000), ("num_hidden_layers", 2_000)]
)
def test_a_wrong_size_in_the_config_is_refused_before_it_is_allocated(saved, field, size):
    edit(saved / "config.json", **{field: size, "head_dim": 16})
    with pytest.raises(ConfigError, match=r"wanted is .*2000000000|lacks"):
        load_model(saved)


def test_tied_weights_stay_one_parameter(tmp_path):
    save_model(tiny_model("qwen2"), tmp_path)
    loaded = load_model(tmp_path)
    assert loaded.head.weight is loaded.embedding.weight
    assert "lm_head.weight" not in load_file(tmp_path / WEIGHTS)


def test_the_stored_dtype_is_the_default(tmp_path):
    save_model(tiny_model(dtype=torch.bfloat16), tmp_path)
    assert stored_dtype(tmp_path) == torch.bfloat16
    assert load_model(tmp_path).dtype == torch.bfloat16
    widened = load_model(tmp_path, torch.float32)
    rounded = tiny_model().embedding.weight.bfloat16().float()
    assert torch.equal(widened.embedding.weight, rounded)


def test_the_older_name_of_the_dtype_is_read(saved):
    edit(saved / "config.json", dtype=None, torch_dtype="float16")
    assert stored_dtype(saved) == torch.float16
    edit(saved / "config.json", torch_dtype="int8")
    with pytest.raises(ConfigError, match="int8"):
        stored_dtype(saved)


def test_saving_again_removes_the_earlier_files(tmp_path):
    save_model(tiny_model(seed=1), tmp_path, max_shard_bytes=30_000)
    (tmp_path / "notes.txt").write_text("mine")
    model = tiny_model(seed=2)
    save_model(model, tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"config.json", WEIGHTS, "notes.txt"}
    save_model(model, tmp_path, max_shard_bytes=30_000)
    assert not (tmp_path / WEIGHTS).exists()
    assert torch.equal(logits(load_model(tmp_path)), logits(model))


def test_frequencies_in_older_files_are_ignored(saved):
    edit_weights(saved, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    assert torch.equal(logits(load_model(saved)), logits(tiny_model("llama")))


def test_a_tied_model_may_repeat_its_head_but_not_change_it(tmp_path):
    model = tiny_model("qwen2")
    save_model(model, tmp_path)
    edit_weights(tmp_path, {"lm_head.weight": model.embedding.weight.detach().clone()})
    assert torch.equal(logits(load_model(tmp_path)), logits(model))
    edit_weights(tmp_path, {"lm_head.weight": model.embedding.weight.detach() + 1})
    with pytest.raises(ConfigError, match="tie_word_embeddings"):
        load_model(tmp_path)


NORM = "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({NORM: None}, [NORM, "lacks"]),
        ({"model.extra.weight": torch.ones(2)}, ["model.extra.weight", "not wanted"]),
        ({NORM: torch.ones(31)}, [NORM, "[31]", "[32]"]),
        ({"lm_head.weight": None}, ["lm_head.weight", "tie_word_embeddings"]),
        ({NORM: torch.ones(32, dtype=torch.int8)}, [NORM, "int8", "quantized"]),
        ({NORM: torch.tensor([torch.nan, torch.inf] + [1.0] * 30)}, [NORM, "2 values"]),
    ],
)
def test_the_error_names_a_tensor_that_does_not_fit(saved, changes, words):
    edit_weights(saved, changes)
    with pytest.raises(ConfigError) as error:
        load_model(saved)
    assert all(word in str(error.value) for word in [str(saved), *words])


def without_weights(saved: Path) -> None:
    (saved / WEIGHTS).unlink()


def with_an_index(index: str) -> Callable[[Path], None]:
    def spoil(saved: Path) -> None:
        without_weights(saved)
        (saved / INDEX).write_text(index)

    return spoil


def of_another_architecture(saved: Path) -> None:
    without_weights(saved)  # refused before they are read
    edit(saved / "config.json", architectures=["MambaForCausalLM"], model_type="mamba")


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (lambda d: d.rename(d.with_name("moved")), ConfigError, "model"),
        (lambda d: (d / "config.json").unlink(), ConfigError, r"config\.json"),
        *(
            (lambda d, c=c: (d / "config.json").write_bytes(c), ConfigError, "copy the file again")
            for c in (b'{"vocab_size": ', b"[1, 2]", b"\xff\xfe\x00")
        ),
        (of_another_architecture, UnsupportedModelError, "MambaForCausalLM.*LlamaForCausalLM"),
        (
            lambda d: (d / WEIGHTS).rename(d / "pytorch_model.bin"),
            ConfigError,
            r"pytorch_model\.bin.*safe_serialization",
        ),
        (without_weights, ConfigError, r"no model\.safetensors"),
        (
            lambda d: (d / WEIGHTS).write_bytes((d / WEIGHTS).read_bytes()[:-100]),
            ConfigError,
            r"model\.safetensors is not a readable",
        ),
        (with_an_index("{"), ConfigError, "malformed"),
        (with_an_index('{"weight_map": {"a": "../b.safetensors"}}'), ConfigError, "malformed"),
        (with_an_index('{"weight_map": {"a": "b.safetensors"}}'), ConfigError, "lacks 'b.safe"),
    ],
)
def test_a_damaged_directory_is_refused_by_name(saved, spoil, error, message):
    spoil(saved)
    with pytest.raises(error, match=message):
        load_model(saved)


@pytest.fixture
def files_of_at_most_10_kb() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("files_of_at_most_10_kb")
def test_a_failed_write_is_a_checkpoint_error(tmp_path):
    with pytest.raises(CheckpointError, match=f"{tmp_path}.*free some space"):
        save_model(tiny_model(), tmp_path)


def test_eos_and_bos_ids_are_saved_with_the_model(tmp_path):
    save_model(tiny_model(), tmp_path, eos_ids=(1, 7), bos_id=3)
    tiny_tokenizer().save(tmp_path)
    assert load_tokenizer(tmp_path).eos_ids == (1, 7)
    assert load_tokenizer(tmp_path).bos_id == 3
    assert json.loads((tmp_path / "config.json").read_text())["bos_token_id"] == 3


def test_a_tokenizer_larger_than_the_model_is_refused():
    tokenizer = tiny_tokenizer()
    tokenizer.limit(105)
    with pytest.raises(ConfigError, match=r"104.*vocab_size = 104"):
        tokenizer.limit(104)
