"""Opens the policy that a run trains: our decoder, or the modelling code of transformers."""

from pathlib import Path

import torch

from longtail.config.rl import LearnerSection, RunConfig
from longtail.errors import UnsupportedModelError
from longtail.model.hf.adapters import AdaptedModel
from longtail.model.hf.causal import CausalModel, read_pretrained
from longtail.model.hf.model import load_config, load_model, stored_dtype
from longtail.model.policy import Policy
from longtail.system.device import DTYPES


def open_policy(directory: Path, config: RunConfig, device: torch.device | str) -> Policy:
    """Read the model of a directory for the learner. Raises ConfigError."""
    dtype = DTYPES[config.learner.dtype]
    if not uses_transformers(directory, config.learner):
        return load_model(directory, dtype, device)
    lora = config.learner.lora
    if lora is None:
        return CausalModel(read_pretrained(directory, dtype, device))
    adapted = AdaptedModel(read_pretrained(directory, dtype), lora, config.run.seed)
    if holds_bfloat16(directory, config.learner):
        adapted.hold_frozen(torch.bfloat16)  # before a GPU would have to hold the wider ones
    return adapted.to(device)


def uses_transformers(directory: Path, own: LearnerSection) -> bool:
    """Return whether transformers' code is trained: by choice, or because ours lacks the family."""
    if own.model != "auto" or own.lora is not None:
        return own.model != "own"
    try:
        load_config(directory)
    except UnsupportedModelError:
        return True
    return False


def holds_bfloat16(directory: Path, own: LearnerSection) -> bool:
    """Return whether frozen matrices stay in bfloat16: as they are stored and multiplied."""
    is_frozen = own.lora is not None and own.autocast is True
    return is_frozen and stored_dtype(directory) == torch.bfloat16
