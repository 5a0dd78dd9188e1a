"""New weights for a drafter that vLLM runs, read from disk and checked before anything changes.

    a directory in vLLM's layout        as `longtail drafter export` writes it
    a drafter directory                 drafter.json and drafter.safetensors
    the drafter folder of a run         the newest step; or one step

The tensors must have the names and shapes of the drafter that the engine started with. A digest in
config.json must be theirs.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longtail.drafter.formats.checkpoint import LoadedDrafter, is_drafter, load_unbound
from longtail.drafter.formats.eagle_files import plain_name
from longtail.drafter.formats.layouts import SECTION, layer_tensors
from longtail.drafter.weights import DRAFT_IDS, load_parameters, tensors_digest
from longtail.errors import CheckpointError, ConfigError
from longtail.model.hf.model import read_fields
from longtail.model.hf.weights import read_head, read_tensors, tensor_names, tensor_shapes
from longtail.run.checkpoint import step_of
from longtail.run.drafter_store import INITIAL, DrafterStore, run_drafters

_OF_THE_TARGET = ("lm_head.weight", "embed_tokens.weight", "d2t", "t2d")
"""Tensors that an update may leave as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftWeights:
    """Tensors of a drafter, named as vLLM's loader reads them."""

    tensors: Mapping[str, Tensor]
    digest: str
    """SHA-256 of the tensors as they were stored."""
    version: int | None = None
    """Version of the publisher of a run; None for other directories."""


def read_weights(path: Path, running: Path, target: Path) -> DraftWeights:
    """Read new weights for the drafter in `running`, whose target is in `target`.

    Raises ConfigError, or NonFiniteError with a tensor's name, if they cannot be adopted.
    """
    if run_drafters(path) is not None or is_drafter(path):
        found = _of_longtail(path, running, target)
    elif tensor_names(path):
        found = _of_engine(path)
    else:
        raise ConfigError(
            f"drafter {path}: it holds no weights; give a directory of `longtail drafter export`, "
            "or the drafter folder of a run"
        )
    _require_same_shapes(path, found.tensors, running)
    return found


def _of_engine(path: Path) -> DraftWeights:
    tensors = read_tensors(path)
    digest = tensors_digest(tensors)
    section: Mapping[str, Any] = {}
    if (path / "config.json").is_file():
        section = read_fields(path).section(SECTION).everything()
    if (written := section.get("digest", digest)) != digest:
        raise ConfigError(
            f"drafter {path}: its digest is {digest}, config.json says {written}: copy it again"
        )
    return DraftWeights(tensors=tensors, digest=digest)


# ---- longtail's own files


def _of_longtail(path: Path, running: Path, target: Path) -> DraftWeights:
    given, version = _load(path)
    loaded = given.as_eagle()
    stored = {name: parameter.detach() for name, parameter in loaded.eagle.named_parameters()}
    if loaded.draft_ids is not None:
        stored[DRAFT_IDS] = loaded.draft_ids
    tensors = layer_tensors(loaded.eagle, loaded.eagle.dtype)
    if loaded.eagle.config.recipe == "eagle3":
        tensors |= _vocabulary(loaded, running, target)
    return DraftWeights(tensors=tensors, digest=tensors_digest(stored), version=version)


def _load(path: Path) -> tuple[LoadedDrafter, int | None]:
    """Read a drafter and the version of its publisher."""
    place = run_drafters(path)
    if place is None:
        return load_unbound(path), None
    loaded = load_unbound(place / INITIAL)
    step = step_of(path)
    state = None
    if path.name != INITIAL:
        state = DrafterStore(place).load(sys.maxsize if step is None else step)
    if state is None:
        return loaded, 0
    tensors = state.drafter()
    try:
        load_parameters(loaded.layer, tensors)
    except CheckpointError as error:
        raise ConfigError(f"drafter {path}: {error}; give the folder of one run") from error
    ids = tensors.get(DRAFT_IDS, loaded.draft_ids)
    return replace(loaded, draft_ids=ids), int(state.numbers["version"])


def _vocabulary(loaded: LoadedDrafter, running: Path, target: Path) -> dict[str, Tensor]:
    """Return head and ids of the draft vocabulary if they differ from those in the engine."""
    tensors: dict[str, Tensor] = {}
    if loaded.head is not None:
        tensors["lm_head.weight"] = loaded.head
    ids = loaded.draft_ids
    if ids is None:
        return tensors
    offsets = ids - torch.arange(len(ids))
    if torch.equal(read_tensors(running).get("d2t", torch.empty(0)).to(offsets), offsets):
        return tensors
    tensors["d2t"] = offsets
    if loaded.head is None:
        tensors["lm_head.weight"] = read_head(target)[ids]
    return tensors


# ---- checks


def _require_same_shapes(path: Path, tensors: Mapping[str, Tensor], running: Path) -> None:
    """Raise ConfigError unless the drafter in the engine has these tensors."""
    if not running.is_dir():  # a name of the hub: vLLM's loader checks names and shapes
        return
    mine = {plain_name(name): shape for name, shape in tensor_shapes(running).items()}
    new = {plain_name(name): tuple(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted(mine | new):
        if name not in new and name in _OF_THE_TARGET:
            continue
        if mine.get(name) != new.get(name) and not (name in _OF_THE_TARGET and name not in mine):
            raise ConfigError(
                f"drafter {path}: {name} has shape {new.get(name)}, the drafter of the engine "
                f"({running}) has {mine.get(name)}: give a drafter trained from that one"
            )
