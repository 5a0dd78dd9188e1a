"""Incremental detokenizer: text(a) + text(b) = text(a + b), which tokenizers do not promise.

The decoders of a tokenizer.json read a whole text: SentencePiece drops its first space, and one
incomplete character makes U+FFFD of all bytes beside it.
"""

import re
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any, Literal, final

from longtail.system.files import parse_json

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
"""A token of SentencePiece that is a byte."""
_SPACE = "\u2581"
"""A space as SentencePiece writes it."""
_PIECES = {"Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}
"""Steps of decoders that join pieces; Replace is that of the space."""


@final
class TokenDecoder:
    """Bytes and texts of the tokens of a transformers' tokenizer."""

    def __init__(self, inner: Any, left_out: Collection[int]) -> None:
        self._inner = inner  # a PreTrainedTokenizerBase
        self._left_out = frozenset(left_out)
        """Tokens that are in no text, those of `silent_tokens`."""
        self._bytes: dict[int, bytes] = {}

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens behind others; bytes that are no character are U+FFFD."""
        if self._kind != "other":
            shown = (self.token_bytes(token) for token in tokens if token not in self._left_out)
            return b"".join(shown).decode(errors="replace")
        before = self._inner.encode("a", add_special_tokens=False)
        texts = [
            self._inner.decode(each, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            for each in (before, [*before, *tokens])
        ]
        return texts[1][len(texts[0]) :]

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one token, special or not; an unknown id has none."""
        found = self._bytes.get(token)
        if found is None:
            found = self._bytes[token] = self._spelled(token)
        return found

    def _spelled(self, token: int) -> bytes:
        piece = self._inner.convert_ids_to_tokens(token)
        if piece is None:
            return b""
        if self._kind == "bytes":
            is_plain = token in self._added or not all(each in self._byte_of for each in piece)
            return piece.encode() if is_plain else bytes(self._byte_of[each] for each in piece)
        if byte := _BYTE.fullmatch(piece):
            return bytes.fromhex(byte[1])
        return piece.replace(_SPACE, " ").encode()

    @cached_property
    def _kind(self) -> Literal["bytes", "pieces", "other"]:
        """Spelling of tokens: letters for bytes (byte-level BPE), or pieces of text."""
        backend = getattr(self._inner, "backend_tokenizer", None)
        if backend is None or backend.decoder is None:
            return "other"
        decoder = parse_json(backend.decoder.__getstate__())
        steps = decoder.get("decoders", [decoder])
        names = {step["type"] for step in steps}
        replaced = [step["pattern"] for step in steps if step["type"] == "Replace"]
        if names <= _PIECES and all(each == {"String": _SPACE} for each in replaced):
            return "pieces"
        return "bytes" if names == {"ByteLevel"} else "other"

    @cached_property
    def _byte_of(self) -> dict[str, int]:
        """The byte of each letter of byte-level BPE."""
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        return {letter: byte for byte, letter in bytes_to_unicode().items()}  # type: ignore[no-untyped-call]

    @cached_property
    def _added(self) -> dict[int, Any]:
        """Added tokens by id; transformers makes them anew on each call."""
        return self._inner.added_tokens_decoder


def silent_tokens(inner: Any, eos_ids: Sequence[int]) -> dict[str, int]:
    """Return the special tokens that are in no text: all but pairs as <think> and </think>.

    Such pairs are markup of an answer. What begins, ends or pads a text is none.
    """
    added = inner.added_tokens_decoder.items()
    special = {token.content: i for i, token in added if token.special}
    names = (f"{name}_token_id" for name in ("bos", "eos", "unk", "pad"))
    control = {None, *eos_ids, *(getattr(inner, name) for name in names)}
    pairs = [(i, special.get(f"{name[:1]}/{name[1:]}")) for name, i in special.items()]
    markup = {i for pair in pairs if control.isdisjoint(pair) for i in pair}
    return {name: i for name, i in special.items() if i not in markup}
