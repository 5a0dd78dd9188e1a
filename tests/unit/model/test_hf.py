"""Model directories: saving and loading, and the errors of malformed ones."""

import json
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from longtail.errors import CheckpointError, ConfigError, NonFiniteError, UnsupportedModelError
from longtail.model.attention import PackedAttention
from longtail.model.hf.model import load_config, load_model, save_model, stored_dtype
from longtail.model.hf.tokenizer import check_vocabulary, load_tokenizer
from longtail.model.hf.weights import from_hf, to_hf
from longtail.model.transformer import Family, Transformer
from support.tiny_models import tiny_config, tiny_model, tiny_tokenizer

FAMILIES: tuple[Family, ...] = ("llama", "mistral", "qwen2", "qwen3")
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
    ("field", "size"),
    [("vocab_size", 2_000_000_000), ("num_hidden_layers", 10_000), ("hidden_size", 2**30)],
)
def test_a_wrong_size_in_the_config_is_refused_before_it_is_allocated(
    saved: Path, field: str, size: int
) -> None:
    edit(saved / "config.json", **{field: size, "head_dim": 16})
    with pytest.raises(ConfigError, match=r"config\.json gives|lacks"):
        load_model(saved)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_model_is_loaded_unchanged(family: Family, tmp_path: Path) -> None:
    model = tiny_model(family)
    save_model(model, tmp_path)
    loaded = load_model(tmp_path)
    assert loaded.config == model.config
    assert torch.equal(logits(loaded), logits(model))


def test_tied_weights_stay_one_parameter(tmp_path: Path) -> None:
    save_model(tiny_model("qwen2"), tmp_path)
    loaded = load_model(tmp_path)
    assert loaded.head.weight is loaded.embedding.weight
    assert "lm_head.weight" not in load_file(tmp_path / WEIGHTS)


def test_a_loaded_model_can_be_trained(tmp_path: Path) -> None:
    save_model(tiny_model("qwen3"), tmp_path)
    model = load_model(tmp_path)
    tokens = torch.arange(5)
    model.logits(model(tokens, tokens, PackedAttention((0, 5)))).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_stored_dtype_is_the_default(tmp_path: Path) -> None:
    save_model(tiny_model(), tmp_path, dtype=torch.bfloat16)
    assert stored_dtype(tmp_path) == torch.bfloat16
    assert load_model(tmp_path).dtype == torch.bfloat16
    widened = load_model(tmp_path, torch.float32)
    rounded = tiny_model().embedding.weight.bfloat16().float()
    assert torch.equal(widened.embedding.weight, rounded)


def test_the_older_name_of_the_dtype_is_read(saved: Path) -> None:
    edit(saved / "config.json", dtype=None, torch_dtype="float16")
    assert stored_dtype(saved) == torch.float16
    edit(saved / "config.json", torch_dtype="int8")
    with pytest.raises(ConfigError, match="int8"):
        stored_dtype(saved)


@pytest.mark.parametrize("family", FAMILIES)
def test_from_hf_inverts_to_hf(family: Family) -> None:
    model = tiny_model(family)
    state = dict(model.named_parameters())
    back = from_hf(to_hf(state, model.config), model.config)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)


def test_the_fused_projection_has_queries_then_keys_then_values() -> None:
    model = tiny_model("llama")
    theirs = to_hf(dict(model.named_parameters()), model.config)
    fused = model.get_parameter("layers.1.attention.qkv.weight")  # 4 query and 2 kv heads of 8
    name = "model.layers.1.self_attn.{}_proj.weight".format
    assert torch.equal(theirs[name("q")], fused[:32])
    assert torch.equal(theirs[name("k")], fused[32:48])
    assert torch.equal(theirs[name("v")], fused[48:])
    gate_up = model.get_parameter("layers.1.feed_forward.gate_up.weight")
    assert torch.equal(theirs["model.layers.1.mlp.gate_proj.weight"], gate_up[:48])
    assert torch.equal(theirs["model.layers.1.mlp.up_proj.weight"], gate_up[48:])


def test_a_state_of_another_model_is_refused() -> None:
    state = dict(tiny_model("llama").named_parameters())
    with pytest.raises(ConfigError, match=r"lacks layers\.0\.attention\.k_norm\.weight"):
        to_hf(state, tiny_config("qwen3"))
    with pytest.raises(ConfigError, match=r"holds layers\.0\.attention\.k_norm\.weight"):
        to_hf(dict(tiny_model("qwen3").named_parameters()), tiny_config("llama"))


def test_shards_respect_their_size_and_the_index_names_every_tensor(tmp_path: Path) -> None:
    model = tiny_model("qwen3")
    save_model(model, tmp_path, max_shard_bytes=30_000)
    files = sorted(tmp_path.glob("*.safetensors"))
    contents = [load_file(file) for file in files]
    index = json.loads((tmp_path / INDEX).read_text())
    assert [file.name for file in files] == [
        f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)
    ]
    for content in contents:
        size = sum(tensor.nbytes for tensor in content.values())
        assert size <= 30_000 or len(content) == 1
    assert index["weight_map"] == {
        name: file.name for file, content in zip(files, contents, strict=True) for name in content
    }
    total = sum(parameter.nbytes for parameter in model.parameters())
    assert index["metadata"]["total_size"] == total
    assert torch.equal(logits(load_model(tmp_path)), logits(model))


def test_saving_again_removes_the_earlier_files(tmp_path: Path) -> None:
    save_model(tiny_model(seed=1), tmp_path, max_shard_bytes=30_000)
    (tmp_path / "notes.txt").write_text("mine")
    model = tiny_model(seed=2)
    save_model(model, tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"config.json", WEIGHTS, "notes.txt"}
    save_model(model, tmp_path, max_shard_bytes=30_000)
    assert not (tmp_path / WEIGHTS).exists()
    assert torch.equal(logits(load_model(tmp_path)), logits(model))


def test_frequencies_in_older_files_are_ignored(saved: Path) -> None:
    edit_weights(saved, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    assert torch.equal(logits(load_model(saved)), logits(tiny_model("llama")))


def test_a_tied_model_may_repeat_its_head_but_not_change_it(tmp_path: Path) -> None:
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
        ({"model.extra.weight": torch.ones(2)}, ["model.extra.weight", "does not have"]),
        ({NORM: torch.ones(31)}, [NORM, "[31]", "[32]"]),
        ({"lm_head.weight": None}, ["lm_head.weight", "tie_word_embeddings"]),
        ({NORM: torch.ones(32, dtype=torch.int8)}, [NORM, "I8", "quantized"]),
    ],
)
def test_the_error_names_a_tensor_that_does_not_fit(
    saved: Path, changes: dict[str, Tensor | None], words: list[str]
) -> None:
    edit_weights(saved, changes)
    with pytest.raises(ConfigError) as error:
        load_model(saved)
    assert all(word in str(error.value) for word in [str(saved), *words])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_the_error_names_a_tensor_with_nan(saved: Path, value: float) -> None:
    weight = torch.ones(32)
    weight[[3, 5]] = value
    edit_weights(saved, {NORM: weight})
    with pytest.raises(NonFiniteError) as error:
        load_model(saved)
    assert NORM in str(error.value)
    assert "2 values" in str(error.value)


def test_a_missing_directory_or_config_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="absent"):
        load_config(tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_model(tmp_path)


@pytest.mark.parametrize("content", [b'{"vocab_size": ', b"[1, 2]", b"\xff\xfe\x00"])
def test_a_malformed_config_is_an_error(saved: Path, content: bytes) -> None:
    (saved / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.json.*copy the file again"):
        load_config(saved)


def test_an_unsupported_architecture_is_refused_before_its_weights(saved: Path) -> None:
    edit(saved / "config.json", architectures=["MambaForCausalLM"], model_type="mamba")
    (saved / WEIGHTS).unlink()
    with pytest.raises(UnsupportedModelError, match=r"MambaForCausalLM.*LlamaForCausalLM"):
        load_model(saved)


def test_pickled_weights_are_never_opened(saved: Path) -> None:
    (saved / WEIGHTS).rename(saved / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin.*safe_serialization"):
        load_model(saved)


def test_missing_weights_are_an_error(saved: Path) -> None:
    (saved / WEIGHTS).unlink()
    with pytest.raises(ConfigError, match=r"no model\.safetensors"):
        load_model(saved)


def test_truncated_weights_are_an_error(saved: Path) -> None:
    file = saved / WEIGHTS
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"model\.safetensors is not a readable"):
        load_model(saved)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ("{", "malformed"),
        ('{"weight_map": null}', "malformed"),
        ('{"weight_map": {"a": "../b.safetensors"}}', "malformed"),
        ('{"weight_map": {"a": "b.safetensors"}}', "lacks b.safetensors"),
    ],
)
def test_an_index_of_missing_or_foreign_files_is_an_error(
    saved: Path, index: str, words: str
) -> None:
    (saved / WEIGHTS).unlink()
    (saved / INDEX).write_text(index)
    with pytest.raises(ConfigError, match=words):
        load_model(saved)


@pytest.fixture
def files_of_at_most_10_kb() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("files_of_at_most_10_kb")
def test_a_failed_write_is_a_checkpoint_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"{tmp_path}.*free space"):
        save_model(tiny_model(), tmp_path)


def test_eos_ids_are_saved_with_the_model(tmp_path: Path) -> None:
    save_model(tiny_model(), tmp_path, eos_ids=(1, 7))
    tiny_tokenizer().save(tmp_path)
    assert load_tokenizer(tmp_path).eos_ids == (1, 7)


def test_a_tokenizer_larger_than_the_model_is_refused() -> None:
    tokenizer = tiny_tokenizer()
    check_vocabulary(tokenizer, tiny_config(vocab_size=105))
    with pytest.raises(ConfigError, match=r"104.*vocab_size = 104"):
        check_vocabulary(tokenizer, tiny_config(vocab_size=104))
