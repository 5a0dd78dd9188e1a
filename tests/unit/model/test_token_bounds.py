"""The bound of the bytes per token holds, or there is none."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from longtail.errors import DataError
from longtail.model.hf.token_bounds import longest_token
from support.tiny_models import byte_level_backend, byte_level_tokenizer, tiny_tokenizer

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def bound(backend: Backend) -> int | None:
    return longest_token(json.loads(backend.to_str()))


BYTE_LEVEL = byte_level_backend()
COMPOSED = byte_level_backend()
COMPOSED.normalizer = normalizers.Sequence([normalizers.NFC()])


def test_the_longest_of_learned_and_added_tokens_is_the_bound() -> None:
    assert bound(BYTE_LEVEL) == len("<eos>")
    assert bound(COMPOSED) == 4 * len("<eos>")


@given(text=st.text("ab \u00e9e\u0301\u0308\u1fbe\u212a\U0001f600<>os", max_size=40))
def test_no_text_has_fewer_tokens_than_the_bound(text: str) -> None:
    for backend in (BYTE_LEVEL, COMPOSED):
        longest = bound(backend)
        assert longest is not None
        assert len(backend.encode(text).ids) * longest >= len(text.encode())


def deleting(change: str) -> Backend:
    backend = byte_level_backend()
    if change == "a normalizer that strips":
        backend.normalizer = normalizers.Strip()
    elif change == "a replacement by nothing":
        backend.normalizer = normalizers.Replace(" ", "")
    elif change == "an added token that swallows blanks":
        backend.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    elif change == "a split that removes":
        split = pre_tokenizers.Split(" ", behavior="removed")
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, backend.pre_tokenizer])
    elif change == "a letter that is not in the vocabulary":
        backend.model = models.BPE({word: i for i, word in enumerate(ALPHABET[1:])}, [])
    else:
        backend.model = models.WordLevel({"a": 0, "?": 1}, unk_token="?")
    return backend


@pytest.mark.parametrize(
    "change",
    [
        "a normalizer that strips",
        "a replacement by nothing",
        "an added token that swallows blanks",
        "a split that removes",
        "a letter that is not in the vocabulary",
        "unknown words",
    ],
)
def test_there_is_no_bound_if_text_may_be_deleted(change: str) -> None:
    assert bound(deleting(change)) is None


def test_other_vocabularies_are_bounded_if_every_character_is_a_token() -> None:
    letters = {"a": 0, "?": 1, "\u2581": 2, "\u2581aa": 3}
    backend = Backend(models.BPE(letters, [], unk_token="?"))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    assert bound(backend) == 5
    backend.model = models.BPE(letters, [], unk_token="?", fuse_unk=True)
    assert bound(backend) is None
    every = letters | {f"<0x{byte:02X}>": 4 + byte for byte in range(256)}
    backend.model = models.BPE(every, [], byte_fallback=True)
    assert bound(backend) == 6


def test_the_lower_bound_needs_no_tokenizing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("tokenized")

    tokenizer = byte_level_tokenizer()
    monkeypatch.setattr(tokenizer._inner, "encode", never)
    assert tokenizer.least_tokens("a" * 20_000_000) == 4_000_000
    assert tokenizer.least_tokens("") == 0
    assert tiny_tokenizer().least_tokens("a" * 1000) == 0  # unknown words may be of any length
    with pytest.raises(DataError, match="half of a surrogate pair"):
        tokenizer.least_tokens("\ud83d")
