"""Tokenizer files from the metadata of a GGUF file: byte-level BPE, the type named gpt2.

The file names its pre-tokenizer and does not describe it, so each supported name has its
description here, as in the tokenizer.json of the models that use it.
"""

from typing import Any

from longtail.model.sources.gguf_file import GGUFFile

_TYPE = "gpt2"
_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5
"""Token types: special, matched as a whole, and padding of the vocabulary."""
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN, _LLAMA3 = _WORDS % r"\p{N}", _WORDS % r"\p{N}{1,3}"
_NAMED = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}
_ENDS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def _split(pattern: str) -> dict[str, Any]:
    isolated = {"pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return _sequence({"type": "Split", **isolated}, _byte_level(False))


def _sequence(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(parts)}


_PRE_TOKENIZERS = {
    "gpt-2": _byte_level(True),
    "smollm": _sequence({"type": "Digits", "individual_digits": True}, _byte_level(True)),
    "qwen2": _split(_QWEN),
    "llama-bpe": _split(_LLAMA3),
    "llama3": _split(_LLAMA3),
    "llama-v3": _split(_LLAMA3),
}
"""Pre-tokenizers of tokenizer.json, by the name in tokenizer.ggml.pre."""
_NFC = {"type": "NFC"}


def tokenizer_files(file: GGUFFile) -> tuple[dict[str, Any], dict[str, Any], str | None]:
    """Return tokenizer.json, tokenizer_config.json and the chat template, if there is one.

    Raises ConfigError for another type of tokenizer or an unknown pre-tokenizer, by its name.
    """
    pre = _pre_tokenizer(file)
    tokens, kinds = _tokens(file)
    vocabulary = {token: i for i, token in enumerate(tokens) if kinds[i] != _UNUSED}
    if len(vocabulary) != sum(kind != _UNUSED for kind in kinds):
        raise file.error("tokenizer.ggml.tokens holds a token twice")
    merges = [_merge(merge, file) for merge in _strings("tokenizer.ggml.merges", file)]
    added = [
        {
            **{"id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False},
            **{"normalized": False, "special": kinds[i] == _CONTROL},
        }
        for i, token in enumerate(tokens)
        if kinds[i] in (_CONTROL, _USER_DEFINED)
    ]
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": _NFC if pre == "qwen2" else None,
        "pre_tokenizer": _PRE_TOKENIZERS[pre],
        "post_processor": None,
        "decoder": _byte_level(True),
        "model": {
            **{"type": "BPE", "dropout": None, "unk_token": None, "fuse_unk": False},
            **{"continuing_subword_prefix": None, "end_of_word_suffix": None},
            **{"byte_fallback": False, "ignore_merges": _PRE_TOKENIZERS[pre] == _split(_LLAMA3)},
            **{"vocab": vocabulary, "merges": merges},
        },
    }
    template = file.metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise file.error("tokenizer.chat_template is not a text")
    return content, _config(tokens, file), template


def end_ids(file: GGUFFile) -> tuple[int, ...]:
    """Return the tokens that end a text: of the text first, then of a turn and of a message."""
    size = len(_strings("tokenizer.ggml.tokens", file))
    ids = (_token_id(key, size, file) for key in _ENDS)
    return tuple(dict.fromkeys(each for each in ids if each is not None))


def _pre_tokenizer(file: GGUFFile) -> str:
    kind, pre = (file.metadata.get(f"tokenizer.ggml.{name}") for name in ("model", "pre"))
    hub = "use the model's own directory or hub id"
    if kind != _TYPE:
        raise file.error(
            f"its tokenizer has type {kind!r:.80} (tokenizer.ggml.model), supported: {_TYPE}", hub
        )
    if pre not in _PRE_TOKENIZERS:
        raise file.error(
            f"its pre-tokenizer {pre!r:.80} (tokenizer.ggml.pre) is not supported; supported: "
            + ", ".join(_PRE_TOKENIZERS),
            hub,
        )
    return str(pre)


def _tokens(file: GGUFFile) -> tuple[list[str], list[int]]:
    """Return the tokens by id, and their types."""
    tokens = _strings("tokenizer.ggml.tokens", file)
    kinds = file.metadata.get("tokenizer.ggml.token_type")
    kinds = [1] * len(tokens) if kinds is None else list(map(int, kinds))
    if len(kinds) != len(tokens):
        raise file.error(f"it has {len(tokens)} tokens and the types of {len(kinds)}")
    return tokens, kinds


def _strings(key: str, file: GGUFFile) -> list[str]:
    found = file.metadata.get(key)
    if not isinstance(found, list) or not found:
        raise file.error(f"its metadata lacks {key}")
    return found


def _merge(merge: str, file: GGUFFile) -> list[str]:
    pair = merge.split(" ")
    if len(pair) != 2:
        raise file.error(f"tokenizer.ggml.merges holds {merge!r:.80}, which is no pair")
    return pair


def _token_id(key: str, size: int, file: GGUFFile) -> int | None:
    found = file.metadata.get(key)
    if found is not None and (type(found) is not int or not 0 <= found < size):
        raise file.error(f"{key} = {found!r:.80} is not one of its {size} tokens")
    return found


def _config(tokens: list[str], file: GGUFFile) -> dict[str, Any]:
    ids = {name: _token_id(key, len(tokens), file) for name, key in _NAMED.items()}
    named = {name: tokens[found] for name, found in ids.items() if found is not None}
    return {"tokenizer_class": "PreTrainedTokenizerFast", **named}
