"""An EAGLE drafter as vLLM runs it: its files, and published weights by vLLM's names."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from longtail.drafter.formats.checkpoint import LoadedDrafter
from longtail.drafter.formats.layouts import rounded, to_tensors, write_layout
from longtail.drafter.weights import DRAFT_IDS, load_parameters
from longtail.model.transformer import Transformer
from longtail.tuner.tuner import Tuner
from longtail.vllm.depths import VllmDrafter


def eagle_drafter(
    loaded: LoadedDrafter, target: Transformer, dtype: torch.dtype, tuner: Tuner, path: Path
) -> VllmDrafter:
    """Write a drafter's first weights into a new directory for vLLM."""
    made = rounded(loaded.copied().as_eagle(), dtype)
    assert made.kind.vllm is not None, "vLLM runs EAGLE"
    write_layout(path, made, target)

    def by_vllms_names(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        new = loaded.copied()
        load_parameters(new.layer, tensors)
        new = replace(new, draft_ids=tensors.get(DRAFT_IDS, new.draft_ids))
        return to_tensors(rounded(new.as_eagle(), dtype), target, dtype)

    return VllmDrafter(
        method=made.kind.vllm,
        tuner=tuner,
        directory=path,
        tensors=by_vllms_names,
    )
