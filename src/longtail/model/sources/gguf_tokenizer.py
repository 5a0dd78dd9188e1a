"""Tokenizers of GGUF files: from metadata to the tokenizer.json of the model that was converted.

A file names its kind. Those in `_SPLITS` and SentencePiece are read; they yield llama.cpp's ids.
"""

from typing import Any

from longtail.errors import ConfigError

TokenizerFiles = tuple[dict[str, Any], dict[str, Any], str | None]
"""tokenizer.json, its settings with the named special tokens, and the chat template if any."""

_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_SIGNS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_FIRST = r"[^\r\n\p{L}\p{N}]?"
_CASES = rf"{_FIRST}{_UPPER}*{_LOWER}+|{_FIRST}{_UPPER}+{_LOWER}*|\p{{N}}"
_QWEN = _LETTERS + r"\p{N}" + _SIGNS
_SPLITS = {
    "gpt-2": None,
    "smollm": None,
    "llama-bpe": _LETTERS + r"\p{N}{1,3}" + _SIGNS,
    "qwen2": _QWEN,
    "deepseek-r1-qwen": _QWEN,
    "tekken": _CASES + _SIGNS.replace(r"[\r\n]*", r"[\r\n/]*", 1),
}
"""Pattern of each kind of byte-level BPE; None: GPT-2's own."""
_WHOLE_WORDS = ("llama-bpe", "tekken")
"""Kinds that merge no word that is a token, and begin a text with BOS if the file is silent."""
_DIGITS = {"type": "Digits", "individual_digits": True}
_PLAIN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
_NAMED = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
"""Types of tokens."""
_SPACE = "\u2581"
"""A space as SentencePiece writes it."""


def field(reader: Any, name: str) -> Any:
    """Return a value of the metadata of a `gguf.GGUFReader`; None if there is none."""
    found = reader.fields.get(name)
    return None if found is None else found.contents()


def check_tokenizer(reader: Any) -> None:
    """Raise ConfigError for a kind of tokenizer that is not read."""
    kind, split = (field(reader, f"tokenizer.ggml.{name}") for name in ("model", "pre"))
    if kind != "llama" and (kind != "gpt2" or split not in _SPLITS):
        raise ConfigError(
            f"tokenizer.ggml.model = {kind!r:.40} with tokenizer.ggml.pre = {split!r:.40} is not "
            f"read; 'llama' is, and 'gpt2' with {', '.join(_SPLITS)}"
        )


def tokenizer_files(reader: Any) -> TokenizerFiles:
    """Return the tokenizer from the metadata of a `gguf.GGUFReader`."""
    names = ("tokens", "token_type", "merges", "scores", "model", "pre", "add_bos_token")
    tokens, types, merges, scores, kind, split, begins = (
        field(reader, f"tokenizer.ggml.{name}") for name in names
    )
    types = types or [_NORMAL] * len(tokens)
    added = [
        {"id": i, "content": tokens[i], **_PLAIN, "special": of_type != _USER_DEFINED}
        for i, of_type in enumerate(types)
        if of_type in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    ids = {name: field(reader, f"tokenizer.ggml.{_NAMED[name]}_token_id") for name in _NAMED}
    named = {f"{name}_token": tokens[i] for name, i in ids.items() if i is not None}
    if kind == "llama":
        steps = _sentencepiece(field(reader, "tokenizer.ggml.add_space_prefix") is not False)
        pairs = _merges(tokens, types, scores)
        options = {"unk_token": named.get("unk_token"), "fuse_unk": True, "byte_fallback": True}
    else:
        steps = _byte_level(split)
        pairs = [merge.split(" ") for merge in merges]
        options = {"ignore_merges": True} if split in _WHOLE_WORDS else {}
    vocabulary = {token: i for i, token in enumerate(tokens)}
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        **steps,
        "model": {"type": "BPE", **options, "vocab": vocabulary, "merges": pairs},
    }
    if begins or (begins is None and (kind == "llama" or split in _WHOLE_WORDS)):
        named["add_bos_token"] = True
    return content, named, field(reader, "tokenizer.chat_template")


def _byte_level(split: str) -> dict[str, Any]:
    """Return the steps of byte-level BPE around the model."""
    pattern = _SPLITS[split]
    step = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    parts: list[dict[str, Any]] = [_DIGITS] if split == "smollm" else []
    if pattern is not None:
        rule = {"pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        parts.append({"type": "Split", **rule})
    parts.append({**step, "use_regex": pattern is None})
    return {
        "normalizer": {"type": "NFC"} if pattern == _QWEN else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": parts},
        "post_processor": None,
        "decoder": {**step, "use_regex": True},
    }


def _sentencepiece(is_prefixed: bool) -> dict[str, Any]:
    """Return the steps of SentencePiece around the model; `is_prefixed`: a text gets a space."""
    before = [{"type": "Prepend", "prepend": _SPACE}] * is_prefixed
    behind = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] * is_prefixed
    space = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    back = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    decoders = [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *behind]
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*before, space]},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
    }


def _merges(tokens: list[str], types: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """Return all pairs of tokens that are a token together, that of the highest score first."""
    known, order = set(tokens), sorted(range(len(tokens)), key=lambda i: -scores[i])
    pairs = (
        (tokens[i][:cut], tokens[i][cut:])
        for i in order
        if types[i] == _NORMAL
        for cut in range(1, len(tokens[i]))
    )
    return [pair for pair in pairs if known.issuperset(pair)]
