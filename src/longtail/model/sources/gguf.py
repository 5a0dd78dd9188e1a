"""GGUF files, read by transformers and kept as Hugging Face directories.

A converted model is in the user's cache, under the digest of the file. transformers leaves out
what it does not know, so a file is refused if not every tensor of it is a tensor of the model.
"""

import contextlib
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from longtail.errors import ConfigError
from longtail.model.hf.config import Fields, emit, parse
from longtail.model.hf.model import write_json
from longtail.model.hf.weights import require_layout, write_weights
from longtail.system.cache import build_once
from longtail.system.files import parse_json, sha256
from longtail.system.tensor_files import kinds_of

KIND = "models"
"""Folder of converted models in the cache."""
CONVERSION = 3
"""Version of the conversion, part of the name of its result."""
_DTYPE = torch.bfloat16
_MAX_SHARD_BYTES = 5 * 2**30
_REMEDY = "use the model's own directory or hub id"

TokenizerFiles = tuple[dict[str, Any], dict[str, Any], str | None]
"""tokenizer.json, the named special tokens and the chat template, if there is one."""


def model_of(
    file: Path,
    where: str,
    log: Callable[[str], None],
    *,
    name: str = "",
    tokenizer: Callable[[Any], TokenizerFiles] | None = None,
) -> Path:
    """Return the directory of a file's model in the user's cache, converted first if it is new.

    `tokenizer` makes the tokenizer from the file's `gguf.GGUFReader`, instead of transformers; such
    a conversion needs a `name` of its own.
    """

    def build(directory: Path) -> None:
        log(f"converting {file} ({file.stat().st_size / 1e6:,.0f} MB), once, in about a minute")
        if tokenizer is None:
            log(
                f"warning: the tokenizer of {file} is the conversion of transformers and may split "
                "some texts in another way than the model's own"
            )
        convert(file, directory, where, log, tokenizer)

    try:
        digest = sha256(file)
    except OSError as error:
        raise ConfigError(f"{where}: the file cannot be read ({error}); check it") from error
    stem = re.sub(r"[^A-Za-z0-9._-]", "_", name or file.stem)[:80]
    return build_once(KIND, f"{stem}-{digest[:16]}-{CONVERSION}", build)


def convert(
    source: Path,
    directory: Path,
    where: str,
    log: Callable[[str], None],
    tokenizer: Callable[[Any], TokenizerFiles] | None = None,
) -> None:
    """Write the model of a GGUF file as a Hugging Face directory, its weights as bfloat16.

    Raises ConfigError, beginning with `where`, for a malformed file and an unsupported model.
    """
    try:
        import gguf

        reader = gguf.GGUFReader(source)
        log("reading the tokenizer")
        files = tokenizer(reader) if tokenizer else _tokenizer(source, reader)
        log(f"reading {len(reader.tensors)} tensors")
        model = _model(source)
    except Exception as error:  # the packages raise any error for a malformed file
        reason = " ".join(f"{error}".split())[:300] or type(error).__name__
        raise ConfigError(
            f"{where}: transformers cannot read the file ({reason}); {_REMEDY}"
        ) from error
    fields = {**model.config.to_dict(), "quantization_config": None}
    config = parse(Fields(fields, where))
    tensors = model.state_dict()
    if config.tied_embeddings:
        del tensors["lm_head.weight"]
    require_layout(kinds_of(tensors), config, where)
    if len(reader.tensors) != len(tensors):
        raise ConfigError(
            f"{where}: the file has {len(reader.tensors)} tensors, of which transformers reads "
            f"{len(tensors)}; {_REMEDY}"
        )
    scaling = field(reader, f"{config.family}.rope.scaling.type")
    if scaling not in (None, "none"):
        raise ConfigError(f"{where}: rope.scaling.type = {scaling!r:.40} is not read; {_REMEDY}")
    log("writing them as bfloat16")
    content, named, template = files
    ends = [end] if (end := field(reader, "tokenizer.ggml.eos_token_id")) is not None else []
    directory.mkdir(parents=True)
    write_weights(tensors, directory, _DTYPE, _MAX_SHARD_BYTES)
    begin = field(reader, "tokenizer.ggml.bos_token_id")
    write_json(directory / "config.json", emit(config, _DTYPE, ends, begin))
    generation = {"bos_token_id": begin, "eos_token_id": ends}
    write_json(directory / "generation_config.json", generation)
    write_json(directory / "tokenizer.json", content)
    named = {"tokenizer_class": "PreTrainedTokenizerFast", **named}
    if field(reader, "tokenizer.ggml.add_bos_token"):
        named["add_bos_token"] = True
    write_json(directory / "tokenizer_config.json", named)
    if template is not None:
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")


def field(reader: Any, name: str) -> Any:
    """Return a value of the metadata of a `gguf.GGUFReader`; None if there is none."""
    found = reader.fields.get(name)
    return None if found is None else found.contents()


def _tokenizer(source: Path, reader: Any) -> TokenizerFiles:
    """Return the tokenizer as transformers converts it."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(
        source.parent, gguf_file=source.name, local_files_only=True, trust_remote_code=False
    )
    end = field(reader, "tokenizer.ggml.eos_token_id")
    if tokenizer.eos_token_id != end:
        raise ValueError(
            f"transformers {transformers.__version__} takes token {tokenizer.eos_token_id} for its "
            f"end, not {end}; a newer version may read it"
        )
    content = parse_json(tokenizer.backend_tokenizer.to_str())
    return content, dict(tokenizer.special_tokens_map), tokenizer.chat_template


def _model(source: Path) -> Any:
    """Return the model as transformers reads it. Raises ValueError if tensors are missing."""
    import transformers

    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    if hasattr(transformers, "GgufConfig"):  # newer versions may keep weights in their blocks
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    reader: Any = transformers.AutoModelForCausalLM
    with contextlib.redirect_stderr(io.StringIO()):  # progress bars
        model, report = reader.from_pretrained(
            source.parent, gguf_file=source.name, dtype=_DTYPE, output_loading_info=True, **options
        )
    if missing := report["missing_keys"]:
        raise ValueError(f"it lacks {sorted(missing)[0]}")
    return model
