"""Writes the drafter of a run as vLLM loads it: files and weights by vLLM's names."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longtail.drafter.formats.checkpoint import LoadedDrafter
from longtail.drafter.formats.eagle_export import rounded, to_tensors, write_layout
from longtail.drafter.weights import load_parameters
from longtail.model.transformer import Transformer
from longtail.tuner.tuner import Tuner
from longtail.vllm.patching import chains

MAX_DEPTH = 8
"""Most tokens that vLLM drafts ahead; its cache and graphs are made for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmDrafter:
    """A drafter that vLLM runs."""

    method: str
    """vLLM's name: eagle, eagle3 or ngram."""
    tuner: Tuner
    """Chooses the depth; it knows vLLM's steps alone, so one without a cost model."""
    directory: Path | None = None
    """Files in the layout of `longtail drafter export`; None for ngram."""
    tensors: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] | None = None
    """Returns published weights by vLLM's names."""

    def config(self) -> dict[str, Any]:
        """Return vLLM's `speculative_config`."""
        found = chains(self.method, MAX_DEPTH)
        return found if self.directory is None else found | {"model": str(self.directory)}


def eagle_drafter(
    loaded: LoadedDrafter, target: Transformer, dtype: torch.dtype, tuner: Tuner, path: Path
) -> VllmDrafter:
    """Write a drafter's first weights into a new directory for vLLM."""
    made = rounded(loaded.copied(), dtype)
    assert made.kind.vllm is not None, "vLLM runs EAGLE"
    write_layout(path, made, target)

    def by_vllms_names(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        new = loaded.copied()
        load_parameters(new.layer, tensors)
        return to_tensors(rounded(new, dtype), target, dtype)

    return VllmDrafter(
        method=made.kind.vllm,
        tuner=tuner,
        directory=path,
        tensors=by_vllms_names,
    )
