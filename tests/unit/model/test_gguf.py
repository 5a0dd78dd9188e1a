"""GGUF files: the model that was written is read, and malformed files are refused."""

import struct
from pathlib import Path

import gguf
import pytest
import torch

from longtail.errors import ConfigError
from longtail.model.hf.model import load_config, load_model
from longtail.model.hf.tokenizer import check_vocabulary, load_tokenizer
from longtail.model.rope import RopeConfig, inverse_frequencies
from longtail.model.sources.gguf import convert, model_of
from longtail.model.transformer import Family, Transformer
from support.gguf_files import SPECIAL, VOCAB_SIZE, tokens, write_gguf
from support.tiny_models import tiny_model

WHERE = "model.path = 'tiny.gguf'"


def _model(family: Family = "llama", **shape) -> Transformer:
    return tiny_model(family, VOCAB_SIZE, norm_eps=2.0**-17, **shape)


def _converted(tmp_path: Path, model: Transformer, **options) -> Path:
    write_gguf(tmp_path / "tiny.gguf", model, **options)
    convert(tmp_path / "tiny.gguf", tmp_path / "model", WHERE)
    return tmp_path / "model"


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        ("llama", {}),
        ("llama", {"qkv_bias": True, "output_bias": True, "mlp_bias": True}),
        ("llama", {"tied_embeddings": True}),
        ("qwen2", {}),
        ("qwen3", {}),
    ],
)
def test_a_model_survives_the_format(tmp_path, family, shape):
    model = _model(family, **shape)
    directory = _converted(tmp_path, model)
    assert load_config(directory) == model.config
    again = load_model(directory)
    for name, parameter in model.state_dict().items():
        assert torch.equal(parameter, again.state_dict()[name]), name


@pytest.mark.parametrize(("kind", "dtype"), [("Q8_0", torch.bfloat16), ("F16", torch.float16)])
def test_packed_weights_are_those_of_the_gguf_package(tmp_path, kind, dtype):
    model = _model("qwen2", intermediate_size=64)
    read = load_model(_converted(tmp_path, model, kind=kind))
    packed = gguf.GGMLQuantizationType[kind]
    for name, parameter in model.state_dict().items():
        values = parameter.numpy()
        if values.ndim > 1:
            values = gguf.dequantize(gguf.quantize(values, packed), packed)
        assert torch.equal(torch.from_numpy(values).to(dtype), read.state_dict()[name]), name


@pytest.mark.parametrize("original", [8192, 4096])
def test_the_rope_of_llama3_is_told_by_its_factors(tmp_path, original):
    rope = RopeConfig(theta=5e5, scaling="llama3", factor=8.0, original_max_positions=8192)
    written = RopeConfig(theta=5e5, scaling="llama3", factor=8.0, original_max_positions=original)
    model = _model(head_dim=32, rope=rope)
    plain = inverse_frequencies(32, RopeConfig(theta=5e5))
    factors = {"rope_freqs.weight": plain / inverse_frequencies(32, written)}
    if original == 8192:
        assert load_config(_converted(tmp_path, model, tensors=factors)).rope == rope
    else:
        with pytest.raises(ConfigError, match=r"rope_freqs\.weight is not that of a rope"):
            _converted(tmp_path, model, tensors=factors)


def test_a_linear_rope_is_in_the_metadata(tmp_path):
    metadata = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    directory = _converted(tmp_path, _model(), metadata=metadata)
    assert load_config(directory).rope == RopeConfig(scaling="linear", factor=4.0)


def test_the_tokenizer_is_in_the_metadata(tmp_path):
    directory = _converted(tmp_path, _model())
    tokenizer, words = load_tokenizer(directory), tokens()
    check_vocabulary(tokenizer, load_config(directory))
    assert tokenizer.eos_ids == (words.index("<|end|>"),)
    named = [words[token] for token in tokenizer.encode("abab 12<|end|>é  ")]
    assert named == ["abab", "Ġ", "12", "<|end|>", "Ã", "©", "ĠĠ"]
    assert tokenizer.decode(tokenizer.encode("ab é 🙂<|end|>")) == "ab é 🙂"
    prompt = tokenizer.chat([{"role": "user", "content": "a"}])
    assert [words[token] for token in prompt] == ["<user>", "a", "<|end|>", "<assistant>"]
    assert set(SPECIAL) <= set(words)


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "ab  12", ["ab", "Ġ", "Ġ", "12"]),
        ("smollm", "ab  12", ["ab", "ĠĠ", "1", "2"]),
        ("qwen2", "ab  12", ["ab", "Ġ", "Ġ", "1", "2"]),
        ("llama-bpe", "ab  12", ["ab", "Ġ", "Ġ", "12"]),
    ],
)
def test_words_are_split_as_the_pre_tokenizer_says(tmp_path, pre, text, expected):
    tokenizer = load_tokenizer(_converted(tmp_path, _model(), pre=pre))
    assert [tokens()[token] for token in tokenizer.encode(text)] == expected


def test_a_file_is_converted_once(tmp_path, monkeypatch):
    monkeypatch.setenv("LONGTAIL_CACHE", str(tmp_path / "cache"))
    write_gguf(tmp_path / "tiny.gguf", _model())
    logged: list[str] = []
    found = [model_of(tmp_path / "tiny.gguf", WHERE, logged.append) for _ in range(2)]
    assert found[0] == found[1]
    assert len(logged) == 1
    write_gguf(tmp_path / "tiny.gguf", _model("qwen3"))
    assert model_of(tmp_path / "tiny.gguf", WHERE, logged.append) != found[0]


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "gemma"}, "architecture 'gemma' is not supported; supported: ll"),
        ({"llama.expert_count": 8}, "architecture 'llama' with experts is not supported"),
        ({"tokenizer.ggml.model": "llama"}, r"tokenizer has type 'llama' .* supported: gpt2"),
        ({"tokenizer.ggml.pre": "tekken"}, r"pre-tokenizer 'tekken' .* supported: gpt-2, smollm"),
        ({"tokenizer.ggml.eos_token_id": 9999}, "eos_token_id = 9999 is not one of its 263 tokens"),
        ({"tokenizer.ggml.merges": ["a"]}, "merges holds 'a', which is no pair"),
        ({"tokenizer.ggml.token_type": [1]}, "263 tokens and the types of 1"),
        ({"llama.rope.dimension_count": 4}, "dimension_count = 4 is not supported, as heads have"),
        ({"llama.rope.scaling.type": "longrope"}, "'longrope'.* supported: none, linear, yarn"),
        ({"llama.attention.head_count": 0}, "gives 0 heads for 32 dimensions"),
        ({"llama.block_count": 3}, r"lacks model\.layers\.2\."),
        ({"llama.block_count": 2_000_000_000}, "num_hidden_layers = 2000000000"),
        ({"llama.feed_forward_length": 47}, "has shape .* but config.json gives"),
        ({"general.alignment": 0}, "general.alignment = 0"),
    ],
)
def test_an_unsupported_model_is_refused_by_name(tmp_path, metadata, message):
    with pytest.raises(ConfigError, match=message) as caught:
        _converted(tmp_path, _model(), metadata=metadata)
    assert str(caught.value).startswith(WHERE)
    assert not (tmp_path / "model").exists()


def _header(pairs: int = 0, tensors: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, pairs)


def _pair(kind: int, value: bytes) -> bytes:
    return _header(pairs=1) + struct.pack("<Q", 1) + b"k" + struct.pack("<I", kind) + value


MALFORMED = {
    "empty": (b"", "cannot be read"),
    "another format": (b"PK\x03\x04" + bytes(40), "does not begin with the letters GGUF"),
    "first version": (_header(version=1), "GGUF version 1 is not supported"),
    "big-endian": (_header(version=3 << 24), "is not supported; convert it to a little-endian"),
    "too many pairs": (_header(pairs=2**60), "counts 1152921504606846976 metadata values"),
    "too many tensors": (_header(tensors=2**60), "counts 1152921504606846976 tensors"),
    "no pairs": (_header(pairs=3), "is cut off"),
    "long name": (_header(pairs=1) + struct.pack("<Q", 2**62), "is cut off"),
    "long array": (_pair(9, struct.pack("<IQ", 0, 2**60)), "elements of type 0"),
    "short array": (_pair(9, struct.pack("<IQ", 12, 2**20)), "is cut off"),
    "array of arrays": (_pair(9, struct.pack("<IQ", 9, 2)), "2 elements of type 9"),
    "unknown type": (_pair(77, b""), "unknown type 77"),
    "not UTF-8": (_pair(8, struct.pack("<Q", 2) + b"\xff\xfe"), "is not UTF-8"),
}


def _tensor(dimensions: list[int], kind: int = 0, offset: int = 0) -> bytes:
    shape = struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
    place = struct.pack("<IQ", kind, offset)
    return _header(tensors=1) + struct.pack("<Q", 1) + b"t" + shape + place


MALFORMED |= {
    "many dimensions": (_tensor([1] * 9), "has 9 dimensions"),
    "no elements": (_tensor([0, 3]), r"has shape \[3, 0\], impossible as F32"),
    "large": (_tensor([2**40, 2**40]), "ends at byte"),
    "far away": (_tensor([2, 2], offset=2**63), "ends at byte"),
    "unknown format": (_tensor([32], kind=9999), "unknown type 9999; use a file of another"),
    "broken blocks": (_tensor([33], kind=8), r"has shape \[33\], impossible as Q8_0"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_file_is_refused_in_one_sentence(tmp_path, name):
    content, message = MALFORMED[name]
    (tmp_path / "bad.gguf").write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        convert(tmp_path / "bad.gguf", tmp_path / "model", WHERE)
    assert str(caught.value).startswith(WHERE)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_cut_off_is_refused_wherever_it_ends(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", _model())
    content = (tmp_path / "tiny.gguf").read_bytes()
    for size in (5, 20, 100, 2000, 20_000, len(content) - 2000):
        (tmp_path / "cut.gguf").write_bytes(content[:size])
        with pytest.raises(ConfigError, match="cut off"):
            convert(tmp_path / "cut.gguf", tmp_path / "model", WHERE)
