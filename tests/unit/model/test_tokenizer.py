import json
from pathlib import Path

import pytest

from longtail.errors import ConfigError, DataError
from longtail.model.hf.model import save_model
from longtail.model.hf.tokenizer import load_tokenizer
from longtail.model.transformer import Family
from support.tiny_models import CHAT_TEMPLATE, tiny_model, tiny_tokenizer

QUESTION = [{"role": "user", "content": "6*7?"}]


def test_encoding_adds_nothing_and_reads_special_tokens() -> None:
    tokenizer = tiny_tokenizer()
    assert tokenizer.encode("") == ()
    digits = tokenizer.encode("10")
    assert digits == (6, 5)  # string.printable begins with the digits, five special tokens before
    assert tokenizer.encode("<user>10<eos>") == (3, *digits, 1)


def test_half_a_surrogate_pair_is_refused() -> None:
    """JSON and the command line accept one; the Rust library raises a TypeError for it."""
    tokenizer = tiny_tokenizer()
    with pytest.raises(DataError, match=r"'\\ud83d', half of a surrogate pair, as character 1"):
        tokenizer.encode("a\ud83d")
    with pytest.raises(DataError, match="half of a surrogate pair"):
        tokenizer.chat([{"role": "user", "content": "\ude00"}])


def test_decoding_removes_special_tokens_and_keeps_spaces() -> None:
    tokenizer = tiny_tokenizer()
    text = "a , b .\n\tc 's"
    assert tokenizer.decode((3, *tokenizer.encode(text), 1, 0)) == text


def test_ids_outside_the_vocabulary_decode_to_nothing() -> None:
    tokenizer = tiny_tokenizer()
    assert tokenizer.decode((5, 120, 6)) == "01"


def test_the_chat_template_ends_where_the_answer_begins() -> None:
    tokenizer = tiny_tokenizer()
    assert tokenizer.render(QUESTION) == "<user>6*7?<eos><assistant>"
    assert tokenizer.render(QUESTION, generation_prompt=False) == "<user>6*7?<eos>"
    assert tokenizer.chat(QUESTION) == (3, *tokenizer.encode("6*7?"), 1, 4)


def test_messages_without_a_template_are_refused() -> None:
    tokenizer = tiny_tokenizer(chat_template=None)
    assert not tokenizer.has_chat_template
    with pytest.raises(DataError, match="chat_template"):
        tokenizer.chat(QUESTION)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ 1 / 0 }}", r"\['user'\]: division by zero"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ messages.a.b }}", "has no attribute 'a'"),
        ("{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", "recursion depth"),
        ("{{ range(10000000) }}", "Range too big"),
        ("{{ raise_exception('only the user') }}", r"\['user'\].*only the user"),
        ("{% for m in", "unexpected 'end of template'"),
    ],
)
def test_a_template_that_fails_is_refused(template: str, reason: str) -> None:
    with pytest.raises(DataError, match=f"tokenizer.chat_template .*{reason}"):
        tiny_tokenizer(chat_template=template).render(QUESTION)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_the_tokenizer_file_decides_for_any_model_family(family: Family, tmp_path: Path) -> None:
    """AutoTokenizer would use qwen2's splitting for any qwen2 directory, against its file."""
    tokenizer = tiny_tokenizer()
    save_model(tiny_model(family), tmp_path)
    tokenizer.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    text = "<user>Hi there, 12+3 = ?\n\tok<eos>"
    assert loaded.encode(text) == tokenizer.encode(text)
    assert loaded.render(QUESTION) == tokenizer.render(QUESTION)
    assert (loaded.eos_ids, loaded.vocab_size) == ((1,), 105)


def test_saving_copies_the_files_that_were_read(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    tiny_tokenizer().save(first)
    (first / "chat_template.jinja").unlink()
    config = json.loads((first / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Qwen2Tokenizer", "chat_template": CHAT_TEMPLATE}
    (first / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(first)
    tokenizer.save(second)
    assert tokenizer.render(QUESTION) == "<user>6*7?<eos><assistant>"
    names = {file.name for file in first.iterdir()}
    assert names == {file.name for file in second.iterdir()}
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in names)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("generation_config.json", [3, 1], (1, 3)),
        ("generation_config.json", 3, (1, 3)),
        ("generation_config.json", None, (1,)),
        ("config.json", 3, (1, 3)),
    ],
)
def test_the_tokenizers_own_eos_comes_first(
    tmp_path: Path, name: str, value: object, expected: tuple[int, ...]
) -> None:
    tiny_tokenizer().save(tmp_path)
    (tmp_path / name).write_text(json.dumps({"eos_token_id": value, "model_type": "llama"}))
    assert load_tokenizer(tmp_path).eos_ids == expected


def test_a_missing_tokenizer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="absent"):
        load_tokenizer(tmp_path / "absent")
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("tokenizer.json", "{", DataError),
        ("tokenizer.json", "{}", DataError),
        ("tokenizer.json", '{"model": {"type": "WordLevel"}}', DataError),
        ("generation_config.json", "{", ConfigError),
        ("generation_config.json", "[]", ConfigError),
        ("generation_config.json", '{"eos_token_id": "two"}', ConfigError),
    ],
)
def test_a_malformed_file_is_refused_by_name(
    tmp_path: Path, name: str, content: str, error: type[Exception]
) -> None:
    tiny_tokenizer().save(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(error, match=f"{name}|the tokenizer cannot be read"):
        load_tokenizer(tmp_path)
