"""Tokenizers of transformers: text to token ids and back. `chat.py` has the chat template.

transformers takes seconds to import, so it is imported when the first tokenizer is made.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

from longtail.errors import ConfigError, DataError
from longtail.model.hf.chat import ChatTemplate
from longtail.model.hf.detokenizer import TokenDecoder
from longtail.model.hf.ends import Ends
from longtail.system.files import find_surrogate, parse_json, read_object

_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_BEFORE = "\n"
"""Text before an encoded completion: SentencePiece merges it with no other."""


@final
class Tokenizer:
    """A vocabulary, and `template`, its chat template.

    Special tokens that are written in a text, as the chat template does, are encoded as such.
    """

    def __init__(
        self,
        inner: Any,
        eos_ids: tuple[int, ...],
        files: Mapping[str, bytes] | None = None,
        bos_id: int | None = None,
    ) -> None:
        self._inner = inner  # transformers' PreTrainedTokenizerBase
        self._files = files or {}
        self._outside = frozenset[int]()
        """Special tokens that have no embedding, of `limit`."""
        self.ends = Ends.of(inner, eos_ids)
        self.bos_id = bos_id
        """Token that begins a text: the tokenizer's own, else the model's; None without any."""
        self.vocab_size = 1 + max(inner.get_vocab().values())
        """One more than the largest token id."""
        self._first = _first_tokens(inner)
        before, word, both = map(self._plain, (_BEFORE, "a", _BEFORE + "a"))
        self._before = () if both == (*before, *word) else before
        """Tokens of a text before completions; () if a whole text is encoded like a completion."""
        self.template = ChatTemplate(inner)
        self._decoder = TokenDecoder(inner, self.ends.special.values())

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end a text, of `ends`."""
        return self.ends.ids

    @property
    def has_chat_template(self) -> bool:
        """Whether there is a chat template, which `chat` needs."""
        return self.template.source is not None

    def encode(
        self, text: str, *, add_special_tokens: bool = False, goes_on: bool = False
    ) -> tuple[int, ...]:
        """Return the tokens of a text. Raises DataError for a lone surrogate.

        With `add_special_tokens` it begins once with the tokens that the tokenizer puts before a
        text (BOS), as models are trained on text that no chat template wrote. What the tokenizer
        puts behind a text is left out. A text that `goes_on`, a completion, gets no first space of
        a whole text, which SentencePiece puts there.
        """
        index = find_surrogate(text)
        if index is not None:
            raise DataError(
                f"a text holds {text[index]!a}, half of a surrogate pair, as character {index}: "
                "give the whole character"
            )
        before = self._before if goes_on else ()
        if before and (tokens := self._plain(_BEFORE + text))[: len(before)] == before:
            return tokens[len(before) :]
        tokens = self._plain(text)
        first = self._first if add_special_tokens else ()
        return tokens if tokens[: len(first)] == first else (*first, *tokens)

    def _plain(self, text: str) -> tuple[int, ...]:
        tokens = tuple(self._inner.encode(text, add_special_tokens=False, verbose=False))
        if outside := self._outside.intersection(tokens):
            name = self._inner.convert_ids_to_tokens(min(outside))
            raise DataError(
                f"a text holds the special token {name!r}, id {min(outside)}, for which the model "
                "has no embedding: take it out of the text"
            )
        return tokens

    def limit(self, num_embeddings: int) -> None:
        """Refuse texts with a special token that has no embedding, as Gemma 3's of an image.

        Raises ConfigError if another token has none.
        """
        special = {i for i, token in self._inner.added_tokens_decoder.items() if token.special}
        outside = {i for i in self._inner.get_vocab().values() if i >= num_embeddings}
        if others := outside - special:
            raise ConfigError(
                f"the tokenizer has token ids up to {max(others)} but the model's "
                f"vocab_size = {num_embeddings}: use the tokenizer that the model was trained with"
            )
        self._outside = frozenset(outside)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens that go on a text, their first space with it.

        Left out are special tokens but pairs of markup as <think> and </think>. Bytes that are no
        character become U+FFFD.
        """
        return self._decoder.text(tokens)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one token, which may be a part of a character.

        Special tokens are written out; an unknown id has no bytes.
        """
        return self._decoder.token_bytes(token)

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Return the tokens of messages, up to the start of the assistant's answer."""
        return self.encode(self.template.render(messages))

    def save(self, path: Path | str) -> None:
        """Write the tokenizer's files into a directory; files that were read stay unchanged."""
        path = Path(path)
        path.mkdir(parents=True, exist_ok=True)
        for name, content in self._files.items():
            (path / name).write_bytes(content)
        if not self._files:
            self._inner.save_pretrained(str(path))


def _first_tokens(inner: Any) -> tuple[int, ...]:
    """Return the special tokens that a tokenizer puts before a text."""
    plain = inner.encode("a", add_special_tokens=False)
    whole = inner.encode("a", add_special_tokens=True)
    places = range(len(whole) - len(plain) + 1)
    found = next((i for i in places if whole[i : i + len(plain)] == plain), 0)
    return tuple(whole[:found])


def _ids(path: Path, inner: Any, name: str) -> tuple[int, ...]:
    """Return the tokenizer's own, then those of generation_config.json, else of config.json.

    `name` is "eos_token_id" or "bos_token_id".
    """
    own = getattr(inner, name)
    ids = [] if own is None else [own]
    names = ("generation_config.json", "config.json")
    file = next((path / each for each in names if (path / each).is_file()), None)
    if file is not None:
        try:
            value = parse_json(file.read_bytes()).get(name)
        except (ValueError, AttributeError) as error:
            raise ConfigError(f"{file} is not a JSON object: copy the file again") from error
        listed = value if isinstance(value, list) else [] if value is None else [value]
        if any(type(token) is not int or token < 0 for token in listed):
            raise ConfigError(f"{file}: {name} = {value!r}: it must be token ids or null")
        ids += listed
    return tuple(dict.fromkeys(ids))


def load_tokenizer(path: Path | str) -> Tokenizer:
    """Read the tokenizer of a model directory. Nothing is downloaded, no code of it is run."""
    path = Path(path)
    if not path.is_dir():
        raise ConfigError(f"tokenizer path {str(path)!r} is not a directory: give a local one")
    files = {name: (path / name).read_bytes() for name in _FILES if (path / name).is_file()}
    if not {"tokenizer.json", "tokenizer.model", "vocab.json"} & files.keys():
        raise DataError(
            f"{path} holds no tokenizer (tokenizer.json): copy the tokenizer files of the model "
            "into it"
        )
    # NOTE: AutoTokenizer rebuilds the pipeline from the model type (every qwen2 vocabulary becomes
    # byte-level BPE); the generic class reads tokenizer.json as it is.
    import transformers

    complete = "tokenizer.json" in files
    reader: Any = transformers.AutoTokenizer
    if complete:
        reader = transformers.PreTrainedTokenizerFast
    try:
        inner = reader.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the Rust library raises no narrower class
        if not {"tokenizer.json", "vocab.json"} & files.keys():
            raise DataError(
                f"{path} holds tokenizer.model alone, which cannot be read here: copy the model's "
                "tokenizer.json into it, or install the packages sentencepiece and protobuf"
            ) from error
        raise DataError(
            f"{path}: the tokenizer cannot be read ({error}): copy its files again"
        ) from error
    if _asks_for_bos(files) and inner.bos_token is not None and not _first_tokens(inner):
        inner.add_bos_token = True  # the generic class reads it from tokenizer.json alone
    if inner.chat_template is None and "chat_template.json" in files:
        file = path / "chat_template.json"  # of transformers' processors
        inner.chat_template = read_object(file, chat_template=str)["chat_template"]
    begins = _ids(path, inner, "bos_token_id")
    return Tokenizer(
        inner,
        _ids(path, inner, "eos_token_id"),
        files if complete else None,
        begins[0] if begins else None,
    )


def _asks_for_bos(files: Mapping[str, bytes]) -> bool:
    try:
        return parse_json(files["tokenizer_config.json"]).get("add_bos_token") is True
    except (KeyError, ValueError, AttributeError):  # what is malformed, transformers refuses
        return False
