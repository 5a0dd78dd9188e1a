"""GGUF files: the model that was written is read, and others are refused."""

from pathlib import Path

import pytest
import torch

from longtail.errors import ConfigError
from longtail.model.hf.model import load_config, load_model
from longtail.model.hf.tokenizer import load_tokenizer
from longtail.model.sources.gguf import convert
from longtail.model.sources.hub import resolve
from longtail.model.transformer import Transformer
from support.gguf_files import VOCAB_SIZE, tokens, write_gguf
from support.tiny_models import tiny_model

pytest.importorskip("transformers", minversion="5.23")  # older ones convert tokenizers wrongly
WHERE = "model.path = 'tiny.gguf'"


def _model(**shape) -> Transformer:
    return tiny_model("llama", VOCAB_SIZE, norm_eps=2.0**-17, **shape)


def _converted(tmp_path: Path, model: Transformer, **options) -> Path:
    write_gguf(tmp_path / "tiny.gguf", model, **options)
    convert(tmp_path / "tiny.gguf", tmp_path / "model", WHERE, print)
    return tmp_path / "model"


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_survives_the_format(tmp_path, tied):
    model = _model(tied_embeddings=tied)
    directory = _converted(tmp_path, model)
    assert load_config(directory) == model.config
    again = load_model(directory).state_dict()
    for name, parameter in model.state_dict().items():
        assert torch.equal(parameter.bfloat16(), again[name]), name


def test_the_tokenizer_is_in_the_metadata(tmp_path):
    directory = _converted(tmp_path, _model())
    tokenizer, words = load_tokenizer(directory), tokens()
    tokenizer.limit(load_config(directory).vocab_size)
    assert tokenizer.eos_ids == (words.index("<|end|>"),)
    named = [words[token] for token in tokenizer.encode("abab 12<|end|>é  ")]
    assert named == ["abab", "Ġ", "12", "<|end|>", "Ã", "©", "ĠĠ"]
    assert tokenizer.decode(tokenizer.encode("ab é 🙂<|end|>")) == "ab é 🙂"
    prompt = tokenizer.chat([{"role": "user", "content": "a"}])
    assert [words[token] for token in prompt] == ["<user>", "a", "<|end|>", "<assistant>"]


def test_a_turn_ends_as_a_text_does(tmp_path):
    end, turn, message = tokens().index("<|end|>"), 7, 9
    names = {"eot_token_id": turn, "eom_token_id": message}
    metadata = {f"tokenizer.ggml.{name}": value for name, value in names.items()}
    directory = _converted(tmp_path, _model(), metadata=metadata)
    assert load_tokenizer(directory).eos_ids == (end, turn, message)


@pytest.mark.parametrize(
    ("text", "words"),
    [("Hello", "\u2581Hello"), (" Hello", "\u2581|\u2581Hello"), ("", "")],
)
def test_sentencepiece_begins_a_text_with_a_space_before_a_space_too(tmp_path, text, words):
    names = ["<unk>", "<s>", "</s>", *"\u2581Helo", "ll", "He", "Hello", "\u2581Hello", "llo"]
    vocabulary = {
        "model": "llama",
        "pre": "default",
        "tokens": names,
        "token_type": [2, 3, 3, *[1] * 10],
        "scores": [float(-i) for i in range(13)],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    directory = _converted(tmp_path, _model(), words=vocabulary)
    tokenizer = load_tokenizer(directory)
    assert "|".join(names[token] for token in tokenizer.encode(text)) == words
    assert tokenizer.encode(text, add_special_tokens=True) == (1, *tokenizer.encode(text))


def test_a_file_is_converted_once(tmp_path, monkeypatch):
    monkeypatch.setenv("LONGTAIL_CACHE", str(tmp_path / "cache"))
    write_gguf(tmp_path / "tiny.gguf", _model())
    logged: list[str] = []
    name = str(tmp_path / "tiny.gguf")
    found = [resolve(name, "model.path", logged.append) for _ in range(2)]
    assert found[0] == found[1]
    assert found[0].is_relative_to(tmp_path / "cache")
    assert len(logged) == 4  # the second call converts nothing
    write_gguf(tmp_path / "tiny.gguf", _model(tied_embeddings=True))
    assert resolve(name, "model.path", logged.append) != found[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metadata": {"general.architecture": "gemma3"}}, "general.architecture = 'gemma3' is"),
        ({"metadata": {"tokenizer.ggml.pre": "abacus"}}, "'gpt2' with .*pre = 'abacus'.*llama-bpe"),
        ({"metadata": {"llama.rope.scaling.type": "linear"}}, "rope.scaling.type = 'linear'"),
        ({"metadata": {"llama.block_count": 3}}, "the file lacks model.layers.2.input_layernorm"),
        ({"metadata": {"llama.feed_forward_length": 2**30}}, "wanted is .*1073741824"),
        ({"tensors": {"rope_freqs.weight": torch.ones(4)}}, "rope_freqs, as in Llama 3.1"),
        ({"tensors": {"output_norm.bias": torch.ones(4)}}, "'output_norm.bias', .* not wanted"),
    ],
)
def test_an_unsupported_model_is_refused(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message) as caught:
        _converted(tmp_path, _model(), **options)
    assert str(caught.value).startswith(WHERE)
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("size", [0, 20, 20_000])
def test_a_file_that_is_cut_off_is_refused_in_one_sentence(tmp_path, size):
    write_gguf(tmp_path / "tiny.gguf", _model())
    content = (tmp_path / "tiny.gguf").read_bytes()
    (tmp_path / "tiny.gguf").write_bytes(content[:size])
    with pytest.raises(ConfigError, match="the file cannot be read") as caught:
        convert(tmp_path / "tiny.gguf", tmp_path / "model", WHERE, print)
    assert "\n" not in str(caught.value)
