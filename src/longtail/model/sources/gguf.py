"""GGUF files, read by transformers and kept as Hugging Face directories.

A converted model is in the user's cache, under the digest of the file. transformers leaves out
what it does not know, so a file is refused if not every tensor of it is a tensor of the model.
"""

import contextlib
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import torch

from longtail.errors import ConfigError
from longtail.model.hf.config import Fields, emit, parse
from longtail.model.hf.model import write_json
from longtail.model.hf.weights import require_layout, write_weights
from longtail.model.sources.gguf_tokenizer import check_tokenizer, field, tokenizer_files
from longtail.model.transformer import Family
from longtail.system.cache import build_once
from longtail.system.files import sha256
from longtail.system.tensor_files import kinds_of

KIND = "models"
"""Folder of converted models in the cache."""
CONVERSION = 4
"""Version of the conversion, part of the name of its result."""
_DTYPE = torch.bfloat16
_MAX_SHARD_BYTES = 5 * 2**30
_ENDS = ("bos", "eos", "eot", "eom")
"""Tokens that begin a text, and that end text, turn and message."""
_REMEDY = "use the model's own directory or hub id"


def model_of(file: Path, where: str, log: Callable[[str], None], *, name: str = "") -> Path:
    """Return the directory of a file's model in the user's cache, converted first if it is new.

    It has the given name, else that of the file.
    """

    def build(directory: Path) -> None:
        log(f"converting {file} ({file.stat().st_size / 1e6:,.0f} MB), once, in about a minute")
        convert(file, directory, where, log)

    try:
        digest = sha256(file)
    except OSError as error:
        raise ConfigError(f"{where}: the file cannot be read ({error}); check it") from error
    stem = re.sub(r"[^A-Za-z0-9._-]", "_", name or file.stem)[:80]
    return build_once(KIND, f"{stem}-{digest[:16]}-{CONVERSION}", build)


def convert(source: Path, directory: Path, where: str, log: Callable[[str], None]) -> None:
    """Write the model of a GGUF file as a Hugging Face directory, its weights as bfloat16.

    Raises ConfigError, beginning with `where`, for a malformed file and an unsupported model.
    """
    try:
        import gguf

        reader = gguf.GGUFReader(source)
        _check_header(reader)
        log("reading the tokenizer")
        content, settings, template = tokenizer_files(reader)
        log(f"reading {len(reader.tensors)} tensors")
        model = _model(source)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}; {_REMEDY}") from error
    except Exception as error:  # the packages raise any error for a malformed file
        reason = " ".join(f"{error}".split())[:300] or type(error).__name__
        raise ConfigError(f"{where}: the file cannot be read ({reason}); {_REMEDY}") from error
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
    log("writing them as bfloat16")
    directory.mkdir(parents=True)
    write_weights(tensors, directory, _DTYPE, _MAX_SHARD_BYTES)
    begin, *found = (field(reader, f"tokenizer.ggml.{name}_token_id") for name in _ENDS)
    ends = list(dict.fromkeys(end for end in found if end is not None))
    write_json(directory / "config.json", emit(config, _DTYPE, ends, begin))
    generation = {"bos_token_id": begin, "eos_token_id": ends}
    write_json(directory / "generation_config.json", generation)
    write_json(directory / "tokenizer.json", content)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **settings}
    write_json(directory / "tokenizer_config.json", settings)
    if template is not None:
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")


def _check_header(reader: Any) -> None:
    """Raise ConfigError for metadata of a file that is not read."""
    family = field(reader, "general.architecture")
    if family not in get_args(Family):
        raise ConfigError(
            f"general.architecture = {family!r:.40} is not read from GGUF files, but "
            f"{', '.join(get_args(Family))}"
        )
    scaling = field(reader, f"{family}.rope.scaling.type")
    if scaling not in (None, "none"):
        raise ConfigError(f"{family}.rope.scaling.type = {scaling!r:.40} is not read")
    check_tokenizer(reader)
    _check_sizes(reader, family)


def _check_sizes(reader: Any, family: str) -> None:
    """Raise ConfigError if sizes in the header are not those of the tensors.

    transformers makes a model of the sizes in the header first, however large.
    """
    names = ("block_count", "embedding_length", "feed_forward_length", "attention.head_count")
    layers, hidden, inner, heads = (field(reader, f"{family}.{name}") or 0 for name in names)
    head = field(reader, f"{family}.attention.key_length") or (heads and hidden // heads)
    shapes = {tensor.name: tensor.shape for tensor in reader.tensors}
    if "rope_freqs.weight" in shapes:
        raise ConfigError("its frequencies of RoPE (rope_freqs, as in Llama 3.1) are not read")
    blocks = {name.split(".")[1] for name in shapes if name.startswith("blk.")}
    if len(blocks) != layers:
        raise ConfigError(f"block_count = {layers}: it has the tensors of {len(blocks)} layers")
    for name, size in (
        ("token_embd.weight", hidden),
        ("blk.0.ffn_down.weight", inner),
        ("blk.0.attn_output.weight", heads * head),
    ):
        if name not in shapes or shapes[name][0] != size:
            found = "none" if name not in shapes else shapes[name][0]
            raise ConfigError(f"{name} has {found} inputs, and by the header {size}")


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
