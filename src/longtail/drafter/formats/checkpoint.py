"""Drafter directories: the drafter's own tensors, and a description of its target.

    drafter/
      drafter.json             recipe, taps, window; the target's shape, tokenizer and weights;
                               the training record and the held-out measurements
      drafter.safetensors      the layer, `draft_ids` with a reduced vocabulary, the `head` of a
                               published drafter that has its own, the `sums/` of one that follows
                               from sums

The target's embedding and head are not written. Shape and tokenizer must match the target; weights
only where the caller wants it, because a drafter stays useful after a policy update.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from pydantic import TypeAdapter
from torch import Tensor

from longtail.drafter.eagle.layer import EagleLayer
from longtail.drafter.kind import DraftConfig, DrafterKind, DraftLayer
from longtail.drafter.kinds import KINDS
from longtail.drafter.weights import DRAFT_IDS, wanted_ids, with_prefix, without_prefix
from longtail.errors import ConfigError, NonFiniteError
from longtail.model.hf.tokenizer import Tokenizer
from longtail.model.transformer import Transformer
from longtail.speculation.drafter import Drafter
from longtail.system import tensor_files
from longtail.system.files import printable, read_object, replace_folder, writing
from longtail.system.tensor_files import Kind

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

    def shown(self) -> "TargetIdentity":
        """Return it with no character that a terminal would obey: messages have its texts."""
        return TargetIdentity(**{name: printable(text) for name, text in asdict(self).items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRecord:
    """Training of a drafter, and its measurements on held-out text by depth."""

    steps: int
    tokens: int
    unroll_steps: int
    overlap: tuple[float, ...] = ()
    """Mean of sum_v min(p, q); empty without held-out completions."""
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
    def kind(self) -> DrafterKind:
        """Its kind."""
        return KINDS[self.layer.config.recipe]

    @property
    def eagle(self) -> EagleLayer:
        """The layer in the nearest shape that other engines read: itself if it is EAGLE's."""
        if (convert := self.kind.as_eagle) is None:
            raise ConfigError(f"a {self.layer.config.recipe} drafter has no form for other engines")
        layer: EagleLayer = convert(self.layer)
        return layer

    def drafter(self, target: Transformer) -> Drafter:
        """Return what drafts for a target; it owns the layer."""
        return self.kind.drafter(self.layer, target, draft_ids=self.draft_ids, head=self.head)

    def copied(self) -> "LoadedDrafter":
        """Return the drafter with a copy of its layer, since drafting packs the layer."""
        layer = self.kind.layer(self.layer.config).to(self.layer.device, self.layer.dtype)
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
        tensors = dict[str, Tensor](self.layer.named_parameters())
        if self.draft_ids is not None:
            tensors[DRAFT_IDS] = self.draft_ids
        if self.head is not None:
            tensors[_HEAD] = self.head
        tensors |= with_prefix(_SUMS, self.sums)
        text = json.dumps(description, indent=1, allow_nan=False) + "\n"

        def write(folder: Path) -> None:
            tensor_files.save(tensors, folder / TENSORS)
            (folder / DESCRIPTION).write_text(text, encoding="utf-8")

        with writing("the drafter", path):
            replace_folder(path, write)


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
        kind = KINDS[described["recipe"]].config
        config: DraftConfig = parse_as(kind, {**described, "target": target["shape"]})
        record = parse_as(TrainingRecord, described["training"])
        return config, parse_as(TargetIdentity, target).shown(), record
    except _MALFORMED as error:
        raise malformed(path / DESCRIPTION, error) from error


def parse_as(kind: type[_T], value: Any) -> _T:
    """Return a dataclass from JSON, unknown fields left out; ValueError if types do not match."""
    return TypeAdapter(kind).validate_json(json.dumps(value), strict=True)


def _load(
    path: Path, config: DraftConfig, trained_on: TargetIdentity, training: TrainingRecord
) -> LoadedDrafter:
    """Read the tensors of a description, as stored."""
    kind = KINDS[config.recipe]
    try:
        with torch.device("meta"):  # an untrusted shape: allocated when the tensors have it
            layer = kind.layer(config)
    except _MALFORMED as error:
        raise malformed(path / DESCRIPTION, error) from error
    wanted = {name: Kind(shape=tuple(p.shape)) for name, p in layer.named_parameters()}
    with tensor_files.open_tensors(path / TENSORS) as file:
        wanted |= _beside(kind, config, file.kinds)
        tensors = file.read_all(wanted, _REMEDY)
    sums = without_prefix(_SUMS, tensors)
    try:
        if kind.sums is not None and sums:
            kind.sums(**sums).check()
    except NonFiniteError as error:
        raise ConfigError(f"{path / TENSORS}: {_SUMS}: {error}: {_REMEDY}") from error
    own = {name: tensors[name].clone() for name, _ in layer.named_parameters()}
    layer.load_state_dict(own, assign=True)
    return LoadedDrafter(
        layer=layer.to(next(iter(own.values())).dtype),
        draft_ids=tensors.get(DRAFT_IDS),
        head=tensors.get(_HEAD),
        trained_on=trained_on,
        training=training,
        sums=sums,
    )


def _beside(kind: DrafterKind, config: DraftConfig, found: Mapping[str, Kind]) -> dict[str, Kind]:
    """Return what must be there beside the layer, some of it only if it is found."""
    size, target = config.draft_vocab_size, config.target
    wanted = {DRAFT_IDS: wanted_ids(target.vocab_size, size)} if size else {}
    if _HEAD in found:
        wanted[_HEAD] = Kind(shape=(size or target.vocab_size, target.hidden_size))
    if kind.sums is not None and any(name.startswith(_SUMS) for name in found):
        wanted |= with_prefix(_SUMS, kind.sums.kinds(config))
    return wanted


def malformed(what: object, error: Exception) -> ConfigError:
    """Return the error for a description that cannot be used, on one line."""
    said = printable(" ".join(str(error).split())) or type(error).__name__
    return ConfigError(f"{what} is malformed ({said:.300}): {_REMEDY}")


def is_drafter(path: Path) -> bool:
    """Return whether a directory holds a drafter."""
    return (path / DESCRIPTION).is_file()


def target_name(path: Path) -> str:
    """Return the name of the target that a drafter was trained on."""
    return _describe(path)[1].name


def _read(path: Path) -> dict[str, Any]:
    file = path / DESCRIPTION
    if not file.is_file():
        what = "holds no drafter.json" if path.is_dir() else "is not a directory"
        raise ConfigError(f"drafter {path} {what}: {_REMEDY}")
    description = read_object(file, format=int)
    if description["format"] != _FORMAT:
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
    theirs = {**asdict(config.target), "tokenizer": found.tokenizer, "weights": found.weights}
    own = {**asdict(target.config), "tokenizer": tokenizer_digest(tokenizer)}
    if strict_weights:
        own["weights"] = weights_digest(target)
    for name, value in own.items():
        if name != "max_positions" and theirs[name] != value:
            raise ConfigError(
                f"drafter {path}: it was trained on {found.name}, with {name} = "
                f"{theirs[name]!r}; this target has {name} = {value!r}: {_REMEDY}"
            )
