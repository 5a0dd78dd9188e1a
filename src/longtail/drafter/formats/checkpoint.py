"""Drafter directories: the drafter's own tensors, and a description of its target.

    drafter/
      drafter.json             recipe, taps, window; the target's shape, tokenizer and weights;
                               the training record and the held-out measurements
      drafter.safetensors      the layer, `draft_ids` with a reduced vocabulary, the `head` of a
                               published drafter that has its own, the `sums/` of one that follows
                               from sums

The target's embedding and head are not written. Shape and tokenizer must always match the target;
weights need not, because during RL a drafter stays useful after a policy update. The caller chooses
whether they must match.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from pydantic import TypeAdapter
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from longtail.drafter.architecture import CONFIGS, DraftConfig, DraftLayer, make_layer
from longtail.drafter.eagle.layer import EagleLayer
from longtail.drafter.ridge.trainer import as_eagle
from longtail.drafter.weights import DRAFT_IDS, with_prefix, without_prefix
from longtail.errors import CheckpointError, ConfigError
from longtail.model.hf.tokenizer import Tokenizer
from longtail.model.transformer import Transformer
from longtail.system.files import parse_json, replace_folder
from longtail.system.machine import MAX_INT32

DESCRIPTION, TENSORS = "drafter.json", "drafter.safetensors"
_FORMAT = 1
_HEAD, _SUMS = "head", "sums/"
_SAMPLE = 4096
"""Number of values of a tensor, or tokens of a vocabulary, that its digest reads, evenly spread."""
_MALFORMED = (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError)
"""Errors that malformed descriptions raise."""
_T = TypeVar("_T")
_REMEDY = "give the drafter of this target, or train one: longtail drafter train"


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetIdentity:
    """Identity of the model that a drafter was trained on."""

    name: str
    """Name or path of the target, for messages."""
    tokenizer: str
    """Digest of the tokenizer."""
    weights: str
    """Digest of the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRecord:
    """Training of a drafter, and its measurements on held-out text by depth."""

    steps: int
    tokens: int
    unroll_steps: int
    agreement: tuple[float, ...] = ()
    """Share of equal most likely tokens; empty without held-out text."""
    overlap: tuple[float, ...] = ()
    accept_len: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedDrafter:
    """Contents of a drafter directory."""

    layer: DraftLayer
    draft_ids: Int[Tensor, "draft"] | None
    """Target tokens that the drafter can propose; None: all."""
    head: Float[Tensor, "draft hidden"] | None = None
    """Head of the drafter; None: the target's."""
    trained_on: TargetIdentity
    training: TrainingRecord
    sums: Mapping[str, Tensor] = field(default_factory=dict)
    """Sums that the weights follow from; empty without any."""

    @property
    def eagle(self) -> EagleLayer:
        """The layer; it is EAGLE's."""
        assert isinstance(self.layer, EagleLayer), "see `as_eagle`"
        return self.layer

    def as_eagle(self) -> "LoadedDrafter":
        """Return the drafter in the nearest shape that other engines read."""
        if isinstance(self.layer, EagleLayer):
            return self
        return replace(self, layer=as_eagle(self.layer))

    def copied(self) -> "LoadedDrafter":
        """Return the drafter with a copy of its layer, since drafting packs the layer."""
        layer = make_layer(self.layer.config).to(self.layer.device, self.layer.dtype)
        layer.load_state_dict(self.layer.state_dict())
        return replace(self, layer=layer)

    def save(self, path: Path) -> None:
        """Write a drafter directory atomically, replacing an existing one.

        Raises CheckpointError if it cannot be written.
        """
        # A renewed vocabulary may be of another size.
        size = 0 if self.draft_ids is None else len(self.draft_ids)
        config = replace(self.layer.config, draft_vocab_size=size)
        description = {
            "format": _FORMAT,
            **{name: value for name, value in asdict(config).items() if name != "target"},
            "target": {**asdict(self.trained_on), "shape": asdict(config.target)},
            "training": asdict(self.training),
        }
        tensors = {
            n: p.detach().cpu().contiguous().clone() for n, p in self.layer.named_parameters()
        }
        if self.draft_ids is not None:
            tensors[DRAFT_IDS] = self.draft_ids.cpu().clone()
        if self.head is not None:
            tensors[_HEAD] = self.head.detach().cpu().contiguous().clone()
        tensors |= with_prefix(_SUMS, {name: each.cpu() for name, each in self.sums.items()})
        text = json.dumps(description, indent=1, allow_nan=False) + "\n"

        def write(folder: Path) -> None:
            save_file(tensors, folder / TENSORS, metadata={"format": "pt"})
            (folder / DESCRIPTION).write_text(text, encoding="utf-8")

        write_folder(path, write)


def write_folder(path: Path, write: Callable[[Path], None]) -> None:
    """Write a drafter's directory by `write`, whole or not at all; CheckpointError if it fails."""
    try:
        replace_folder(path, write)
    except CheckpointError:  # also an OSError, and has its own message
        raise
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"the drafter cannot be written to {path}: {error}; free space or choose another path"
        ) from error


_Described = tuple[DraftConfig, TargetIdentity, TrainingRecord]
"""Content of drafter.json."""


def identity(name: str, target: Transformer, tokenizer: Tokenizer) -> TargetIdentity:
    """Return the identity of a target with its present weights."""
    return TargetIdentity(
        name=name, tokenizer=tokenizer_digest(tokenizer), weights=weights_digest(target)
    )


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """Digest a vocabulary: its size, its end-of-text ids, and tokens spread over it."""
    size = tokenizer.vocab_size
    stride = -(-size // _SAMPLE)
    content = [size, tokenizer.eos_ids, [tokenizer.decode([i]) for i in range(0, size, stride)]]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def weights_digest(target: Transformer) -> str:
    """Digest values spread over every parameter, in bfloat16 so that dtypes agree."""
    digest = hashlib.sha256()
    for name, parameter in target.named_parameters():
        flat = parameter.detach().flatten()
        sample = flat[:: -(-flat.numel() // _SAMPLE)].to("cpu", torch.bfloat16)
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        digest.update(sample.contiguous().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


def load_drafter(
    path: Path,
    target: Transformer,
    tokenizer: Tokenizer,
    *,
    strict_weights: bool,
    dtype: torch.dtype | None = None,
) -> LoadedDrafter:
    """Read a drafter of `target` onto its device, in `dtype` (default: as stored).

    Raises ConfigError if it is malformed or its target had another shape or tokenizer; with
    `strict_weights`, also if it had other weights.
    """
    described = _describe(path)
    _require_target(path, described, target, tokenizer, strict_weights=strict_weights)
    loaded = _load(path, replace(described[0], target=target.config), *described[1:])
    device, draft_ids, head = target.device, loaded.draft_ids, loaded.head
    loaded.layer.to(device, dtype or loaded.layer.dtype)
    return replace(
        loaded,
        draft_ids=None if draft_ids is None else draft_ids.to(device),
        head=None if head is None else head.to(device),
    )


def load_unbound(path: Path) -> LoadedDrafter:
    """Read a drafter without its target, whose shape the description holds, as stored.

    Raises ConfigError if it is malformed.
    """
    return _load(path, *_describe(path))


def _describe(path: Path) -> _Described:
    """Read and check drafter.json."""
    described = _read(path)
    try:
        target = described["target"]
        kind = CONFIGS[described["recipe"]]
        config = parse_as(kind, {**described, "target": target["shape"]})
        own = {"draft_vocab_size": 0 <= config.draft_vocab_size <= MAX_INT32}
        for name, is_good in (config.ranges() | own).items():
            if not is_good:
                raise ValueError(f"{name} = {asdict(config)[name]!r:.80}")
        record = parse_as(TrainingRecord, described["training"])
        return config, parse_as(TargetIdentity, target), record
    except _MALFORMED as error:
        raise _malformed(path, error) from error


def parse_as(kind: type[_T], value: Any) -> _T:
    """Return a dataclass from JSON, unknown fields left out; ValueError if types do not match."""
    return TypeAdapter(kind).validate_json(json.dumps(value), strict=True)


def _load(
    path: Path, config: DraftConfig, trained_on: TargetIdentity, training: TrainingRecord
) -> LoadedDrafter:
    """Read the tensors of a description, as stored."""
    try:
        tensors = load_file(path / TENSORS)
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"{path / TENSORS} is not a readable safetensors file ({error}): copy it again"
        ) from error
    draft_ids, head = tensors.pop(DRAFT_IDS, None), tensors.pop(_HEAD, None)
    sums = without_prefix(_SUMS, tensors)
    tensors = {name: each for name, each in tensors.items() if not name.startswith(_SUMS)}
    _require_draft_ids(path, config, draft_ids)
    layer = _layer(path, config, tensors)
    return LoadedDrafter(
        layer=layer.to(next(iter(tensors.values())).dtype),
        draft_ids=draft_ids,
        head=head,
        trained_on=trained_on,
        training=training,
        sums=sums,
    )


def _malformed(path: Path, error: Exception) -> ConfigError:
    said = " ".join(str(error).split()) or type(error).__name__
    return ConfigError(f"{path / DESCRIPTION} is malformed ({said:.300}): {_REMEDY}")


def is_drafter(path: Path) -> bool:
    """Return whether a directory holds a drafter."""
    return (path / DESCRIPTION).is_file()


def target_name(path: Path) -> str:
    """Return the name of the target that a drafter was trained on."""
    try:
        return str(_read(path)["target"]["name"])
    except _MALFORMED as error:
        raise _malformed(path, error) from error


def _read(path: Path) -> dict[str, Any]:
    file = path / DESCRIPTION
    if not file.is_file():
        what = "holds no drafter.json" if path.is_dir() else "is not a directory"
        raise ConfigError(f"drafter {path} {what}: {_REMEDY}")
    try:
        description: dict[str, Any] = parse_json(file.read_bytes())
        known = description["format"] == _FORMAT
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _malformed(path, error) from error
    if not known:
        raise ConfigError(f"{file} has format {description['format']}, known is {_FORMAT}")
    return description


def _require_target(
    path: Path,
    described: _Described,
    target: Transformer,
    tokenizer: Tokenizer,
    *,
    strict_weights: bool,
) -> None:
    """Raise ConfigError, naming the difference, if the drafter is of another target."""
    config, found, _ = described
    theirs = asdict(config.target)
    for name, value in asdict(target.config).items():
        if name != "max_positions" and theirs[name] != value:
            raise ConfigError(
                f"drafter {path}: it was trained on {found.name}, with {name} = "
                f"{theirs[name]!r}; this target has {name} = {value!r}: {_REMEDY}"
            )
    digest = tokenizer_digest(tokenizer)
    if found.tokenizer != digest:
        raise ConfigError(
            f"drafter {path}: it was trained on {found.name}, whose tokenizer is "
            f"{found.tokenizer}; this target's is {digest}: {_REMEDY}"
        )
    if strict_weights and found.weights != (weights := weights_digest(target)):
        raise ConfigError(
            f"drafter {path}: it was trained on {found.name} with the weights {found.weights}; "
            f"this target has other ones, {weights}: {_REMEDY}"
        )


def _require_draft_ids(path: Path, config: DraftConfig, draft_ids: Tensor | None) -> None:
    found = 0 if draft_ids is None else len(draft_ids)
    inside = draft_ids is None or bool(
        ((draft_ids >= 0) & (draft_ids < config.target.vocab_size)).all()
    )
    if found != config.draft_vocab_size or not inside:
        raise ConfigError(
            f"{path / TENSORS}: draft_ids holds {found} tokens, {DESCRIPTION} says "
            f"draft_vocab_size = {config.draft_vocab_size} of {config.target.vocab_size}: "
            f"{_REMEDY}"
        )


def _layer(path: Path, config: DraftConfig, tensors: Mapping[str, Tensor]) -> DraftLayer:
    try:
        with torch.device("meta"):  # an untrusted shape: allocate only after the tensors match it
            layer = make_layer(config)
    except _MALFORMED as error:
        raise _malformed(path, error) from error
    expected = {name: tuple(p.shape) for name, p in layer.named_parameters()}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if expected != shapes:
        odd = min(n for n in {*expected, *shapes} if expected.get(n) != shapes.get(n))
        raise ConfigError(
            f"{path / TENSORS}: {odd} has shape {shapes.get(odd)}, {DESCRIPTION} asks for "
            f"{expected.get(odd)}: {_REMEDY}"
        )
    broken = min((n for n, t in tensors.items() if not t.isfinite().all()), default=None)
    if broken is not None:
        raise ConfigError(f"{path / TENSORS}: {broken} is not finite: {_REMEDY}")
    layer.load_state_dict({name: each.clone() for name, each in tensors.items()}, assign=True)
    return layer
