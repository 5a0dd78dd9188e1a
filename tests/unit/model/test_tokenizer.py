import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longtail.engine.text import Reader
from longtail.errors import ConfigError, DataError
from longtail.model.hf.model import save_model
from longtail.model.hf.tokenizer import Tokenizer, load_tokenizer
from support.tiny_models import (
    CHAT_TEMPLATE,
    byte_level_backend,
    sentencepiece_tokenizer,
    tiny_model,
    tiny_tokenizer,
)

SENTENCEPIECE = sentencepiece_tokenizer()
QUESTION = [{"role": "user", "content": "6*7?"}]


def test_encoding_adds_nothing_and_reads_special_tokens():
    tokenizer = tiny_tokenizer()
    assert tokenizer.encode("") == ()
    digits = tokenizer.encode("10")
    assert digits == (6, 5)  # string.printable begins with the digits, five special tokens before
    assert tokenizer.encode("<user>10<eos>") == (3, *digits, 1)


def test_special_tokens_come_once_before_a_text_and_never_behind():
    tokenizer = tiny_tokenizer(adds_special=True)
    digits = tokenizer.encode("10")
    assert digits == (6, 5)
    assert tokenizer.encode("10", add_special_tokens=True) == (0, *digits)
    assert tokenizer.encode("<pad>10", add_special_tokens=True) == (0, *digits)
    assert tokenizer.encode("", add_special_tokens=True) == (0,)
    assert tokenizer.chat(QUESTION) == (3, *tokenizer.encode("6*7?"), 1, 4)
    assert tiny_tokenizer().encode("10", add_special_tokens=True) == digits


def test_a_tokenizer_config_alone_can_ask_for_bos(tmp_path):
    tiny_tokenizer().save(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    fields = {"add_bos_token": True, "bos_token": "<user>", "tokenizer_class": "LlamaTokenizer"}
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("10", add_special_tokens=True) == (3, *tokenizer.encode("10"))
    assert tokenizer.bos_id == 3


@pytest.mark.parametrize("text", ["ab \u65e5 a\n", "\u00e9\U0001f600", "  abab"])
def test_the_bytes_of_tokens_are_those_of_the_text(text):
    from transformers import PreTrainedTokenizerFast

    inner = PreTrainedTokenizerFast(tokenizer_object=byte_level_backend(), eos_token="<eos>")
    tokenizer = Tokenizer(inner, (inner.eos_token_id,))
    tokens = tokenizer.encode(text)
    assert b"".join(map(tokenizer.token_bytes, tokens)) == text.encode()
    assert tokenizer.token_bytes(inner.eos_token_id) == b"<eos>"
    assert tokenizer.token_bytes(999_999) == b""


@given(text=st.text(alphabet="ab \n</>\u00e9\U0001f999", max_size=12))
def test_a_completion_of_sentencepiece_keeps_its_spaces_and_gets_none(text):
    tokenizer = SENTENCEPIECE
    tokens = tokenizer.encode(text, goes_on=True)
    assert tokenizer.decode(tokens) == text
    assert b"".join(map(tokenizer.token_bytes, tokens)) == text.encode()
    if text:
        assert tokenizer.decode(tokenizer.encode(text)) == f" {text}"  # a whole text


def test_a_completion_of_other_tokenizers_is_encoded_as_a_text():
    tokenizer = tiny_tokenizer()
    assert tokenizer.encode(" \n10", goes_on=True) == tokenizer.encode(" \n10")


def test_a_newline_that_is_a_byte_is_kept_beside_a_cut_character():
    newline, part, other = (SENTENCEPIECE.encode(x, goes_on=True)[0] for x in ("\n", "\u00e9", "a"))
    assert SENTENCEPIECE.decode([newline, part]) == "\n\ufffd"
    assert SENTENCEPIECE.decode([part, other, newline]) == "\ufffda\n"


def test_added_spaces_of_sentencepiece_are_spaces():
    """Gemma's runs of spaces and newlines are added tokens."""
    tokenizer = sentencepiece_tokenizer(["\u2581\u2581\u2581", "\n\n"], special=False)
    last = tokenizer.vocab_size
    assert [tokenizer.token_bytes(i) for i in (last - 2, last - 1)] == [b"   ", b"\n\n"]


def test_markup_in_pairs_is_text_even_if_it_is_special():
    names = ["<think>", "</think>", "[THINK]", "[/THINK]", "<|turn|>", "<end>"]
    tokenizer = sentencepiece_tokenizer(names)
    last = tokenizer.vocab_size
    tokens = [1, *range(last - 6, last), 2]  # <s>, these names, </s>
    assert tokenizer.decode(tokens) == "<think></think>[THINK][/THINK]"
    assert set(tokenizer.ends.special) == {"<unk>", "<s>", "</s>", "<|turn|>", "<end>"}
    reader = Reader(tokenizer.decode, ())
    assert "".join(reader.feed([token]) for token in tokens) == tokenizer.decode(tokens)


def test_special_tokens_may_lack_an_embedding_but_not_those_of_a_text():
    """Gemma 3 has one token of images more than the model of texts has embeddings."""
    tokenizer = sentencepiece_tokenizer(["<image>"])
    tokenizer.limit(tokenizer.vocab_size - 1)
    assert tokenizer.decode(tokenizer.encode("a", goes_on=True)) == "a"
    with pytest.raises(DataError, match=r"special token '<image>', id 2.., for which the model"):
        tokenizer.encode("a<image>b")
    with pytest.raises(ConfigError, match=r"ids up to 2.. but the model's vocab_size = 260"):
        tokenizer.limit(260)


def test_half_a_surrogate_pair_is_refused():
    """JSON and the command line accept one; the Rust library raises a TypeError for it."""
    tokenizer = tiny_tokenizer()
    with pytest.raises(DataError, match=r"'\\ud83d', half of a surrogate pair, as character 1"):
        tokenizer.encode("a\ud83d")
    with pytest.raises(DataError, match="half of a surrogate pair"):
        tokenizer.chat([{"role": "user", "content": "\ude00"}])


def test_decoding_removes_special_tokens_and_keeps_spaces():
    tokenizer = tiny_tokenizer()
    text = "a , b .\n\tc 's"
    assert tokenizer.decode((3, *tokenizer.encode(text), 1, 0)) == text


def test_ids_outside_the_vocabulary_decode_to_nothing():
    tokenizer = tiny_tokenizer()
    assert tokenizer.decode((5, 120, 6)) == "01"


def test_messages_without_a_template_are_refused():
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
def test_a_template_that_fails_is_refused(template, reason):
    with pytest.raises(DataError, match=f"tokenizer.chat_template .*{reason}"):
        tiny_tokenizer(chat_template=template).template.render(QUESTION)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_the_tokenizer_file_decides_for_any_model_family(family, tmp_path):
    """AutoTokenizer would use qwen2's splitting for any qwen2 directory, against its file."""
    tokenizer = tiny_tokenizer()
    save_model(tiny_model(family), tmp_path)
    tokenizer.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    text = "<user>Hi there, 12+3 = ?\n\tok<eos>"
    assert loaded.encode(text) == tokenizer.encode(text)
    assert loaded.template.render(QUESTION) == tokenizer.template.render(QUESTION)
    assert (loaded.eos_ids, loaded.vocab_size) == ((1,), 105)


def test_saving_copies_the_files_that_were_read(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    tiny_tokenizer().save(first)
    (first / "chat_template.jinja").unlink()
    config = json.loads((first / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Qwen2Tokenizer", "chat_template": CHAT_TEMPLATE}
    (first / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(first)
    tokenizer.save(second)
    assert tokenizer.template.render(QUESTION) == "<user>6*7?<eos><assistant>"
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
def test_the_tokenizers_own_eos_comes_first(tmp_path, name, value, expected):
    tiny_tokenizer().save(tmp_path)
    (tmp_path / name).write_text(json.dumps({"eos_token_id": value, "model_type": "llama"}))
    assert load_tokenizer(tmp_path).eos_ids == expected


def test_a_missing_tokenizer_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="absent"):
        load_tokenizer(tmp_path / "absent")
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"no model")
    with pytest.raises(DataError, match=r"tokenizer\.model alone.* copy .*tokenizer\.json.*senten"):
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
def test_a_malformed_file_is_refused_by_name(tmp_path, name, content, error):
    tiny_tokenizer().save(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(error, match=f"{name}|the tokenizer cannot be read"):
        load_tokenizer(tmp_path)
