"""GGUF files, read by transformers and kept as Hugging Face directories.

A converted model is in the user's cache, under the digest of the file. transformers leaves out
what it does not know, so a file is refused if not every tensor of it is a tensor of the model.
"""

import contextlib
import io
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from longtail.errors import ConfigError
from longtail.model.hf.config import Fields, emit, parse
from longtail.model.hf.model import write_json
from longtail.model.hf.weights import layout, require_tensors, write_weights
from longtail.system.cache import build_once
from longtail.system.files import fingerprint

KIND = "models"
"""Folder of converted models in the cache."""
CONVERSION = 2
"""Version of the conversion, part of the name of its result."""
_DTYPE = torch.bfloat16
_MAX_SHARD_BYTES = 5 * 2**30
_REMEDY = "use the model's own directory or hub id"


def model_of(
    file: Path,
    where: str,
    log: Callable[[str], None],
    *,
    name: str = "",
    pipeline: Mapping[str, Any] | None = None,
) -> Path:
    """Return the directory of a file's model in the user's cache, converted first if it is new.

    `pipeline` replaces parts of tokenizer.json; such a conversion needs a `name` of its own.
    """

    def build(directory: Path) -> None:
        log(f"converting {file}, once")
        if pipeline is None:
            log(
                f"warning: the tokenizer of {file} is the conversion of transformers and may split "
                "some texts in another way than the model's own"
            )
        convert(file, directory, where, pipeline or {})

    try:
        digest = fingerprint(file)["sha256"]
    except OSError as error:
        raise ConfigError(f"{where}: the file cannot be read ({error}); check it") from error
    stem = re.sub(r"[^A-Za-z0-9._-]", "_", name or file.stem)[:80]
    return build_once(KIND, f"{stem}-{digest[:16]}-{CONVERSION}", build)


def convert(source: Path, directory: Path, where: str, pipeline: Mapping[str, Any]) -> None:
    """Write the model of a GGUF file as a Hugging Face directory, its weights as bfloat16.

    Raises ConfigError, beginning with `where`, for a malformed file and an unsupported model.
    """
    try:
        model, tokenizer, num_tensors, scaling = _read(source)
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
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    require_tensors(layout(config), shapes, config, where)
    if num_tensors != len(tensors):
        raise ConfigError(
            f"{where}: the file has {num_tensors} tensors, of which transformers reads "
            f"{len(tensors)}; {_REMEDY}"
        )
    if scaling != "none":
        raise ConfigError(f"{where}: rope.scaling.type = {scaling!r:.40} is not read; {_REMEDY}")
    ends = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    directory.mkdir(parents=True)
    write_weights(tensors, directory, _DTYPE, _MAX_SHARD_BYTES)
    write_json(directory / "config.json", emit(config, _DTYPE, ends))
    write_json(directory / "generation_config.json", {"eos_token_id": ends})
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    named = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.special_tokens_map}
    write_json(directory / "tokenizer.json", {**backend, **pipeline})
    write_json(directory / "tokenizer_config.json", named)
    if tokenizer.chat_template is not None:
        (directory / "chat_template.jinja").write_text(tokenizer.chat_template, encoding="utf-8")


def _read(source: Path) -> tuple[Any, Any, int, str]:
    """Return model, tokenizer, the number of tensors in the file and the scaling of its rope."""
    import gguf
    import transformers

    reader = gguf.GGUFReader(source)
    scaling = [value for name, value in reader.fields.items() if name.endswith("rope.scaling.type")]
    options = {"gguf_file": source.name, "local_files_only": True, "trust_remote_code": False}
    tokenizer = transformers.AutoTokenizer.from_pretrained(source.parent, **options)
    if hasattr(transformers, "GgufConfig"):  # newer versions may keep weights in their blocks
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    with contextlib.redirect_stderr(io.StringIO()):  # progress bars
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            source.parent, dtype=_DTYPE, output_loading_info=True, **options
        )
    if missing := report["missing_keys"]:
        raise ValueError(f"it lacks {sorted(missing)[0]}")
    return model, tokenizer, len(reader.tensors), scaling[0].contents() if scaling else "none"
