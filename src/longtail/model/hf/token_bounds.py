"""Maximum number of bytes per token, proved from the tokenizer's own file.

With it, a prompt that is far too long is refused before minutes of tokenizing. A text that fits
must never be refused, so a tokenizer that may delete text (by a normalizer or an unknown-word
token) has no bound.
"""

from collections.abc import Mapping, Sequence
from typing import Any

_KEEPS_TEXT = frozenset({"ByteLevel", "Digits", "Metaspace", "UnicodeScripts", "Prepend"})
"""Steps that replace no character with fewer bytes."""
_BYTES_OF_A_CHARACTER = 4
_NFC_SHRINKS = 4
"""Composed text has at least a quarter of the bytes; the worst known is 7 bytes to 2, iota with
dialytika and tonos."""
_BYTE_LETTERS = frozenset(
    map(chr, (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 256 + 68)))
)
"""Letters of byte-level vocabularies for the 256 bytes: printable ones, and others from 256 on."""


def longest_token(pipeline: Mapping[str, Any]) -> int | None:
    """Return the maximum number of a text's bytes per token; None if it has no proved bound.

    `pipeline` is the content of tokenizer.json.
    """
    normalizers, splitters = _steps(pipeline["normalizer"]), _steps(pipeline["pre_tokenizer"])
    added = pipeline["added_tokens"]
    if any(token["lstrip"] or token["rstrip"] for token in added):  # absorbs blanks
        return None
    composes = sum(step["type"] == "NFC" for step in normalizers)
    others = [step for step in normalizers if step["type"] != "NFC"]
    if not all(_keeps_text(step) for step in (*others, *splitters)):
        return None
    is_byte_level = any(step["type"] == "ByteLevel" for step in (*normalizers, *splitters))
    vocabulary = _covered(pipeline["model"], is_byte_level=is_byte_level)
    if vocabulary is None:
        return None
    letter = len if is_byte_level else _num_bytes  # a letter of the byte alphabet is one byte
    learned = max(map(letter, vocabulary), default=0)
    named = max((_num_bytes(token["content"]) for token in added), default=0)
    return max(learned, named, _BYTES_OF_A_CHARACTER) * _NFC_SHRINKS**composes


def _steps(step: Mapping[str, Any] | None) -> Sequence[Mapping[str, Any]]:
    """Return a step as a flat list of steps."""
    if step is None:
        return []
    if step["type"] != "Sequence":
        return [step]
    inner = step.get("normalizers") or step.get("pretokenizers") or []
    return [each for part in inner for each in _steps(part)]


def _keeps_text(step: Mapping[str, Any]) -> bool:
    kind = step["type"]
    if kind in ("Split", "Punctuation"):
        return step["behavior"] != "Removed"
    if kind == "Replace":
        pattern = step["pattern"].get("String")
        return pattern is not None and _num_bytes(step["content"]) >= _num_bytes(pattern)
    return kind in _KEEPS_TEXT


def _covered(model: Mapping[str, Any], *, is_byte_level: bool) -> Sequence[str] | None:
    """Return the vocabulary if every character gives at least one token, else None."""
    if model["type"] != "BPE":
        return None
    vocabulary = list(model["vocab"])
    known = set(vocabulary)
    if is_byte_level and known >= _BYTE_LETTERS:
        return vocabulary
    if model.get("byte_fallback") and all(f"<0x{byte:02X}>" in known for byte in range(256)):
        return vocabulary
    return vocabulary if model.get("unk_token") and not model.get("fuse_unk") else None


def _num_bytes(text: str) -> int:
    return len(text.encode())
