"""Construction of a model and an engine for `longtail generate` and `longtail serve`."""

import logging
from pathlib import Path

import torch

from longtail.assembly.drafters import Target, drafter_names, open_speculation
from longtail.assembly.precision import emulated, is_fast
from longtail.engine.engine import RolloutEngine
from longtail.engine.request import EngineLimits
from longtail.engine.speculation.speculator import Speculation
from longtail.model.hf.model import load_model, stored_dtype
from longtail.model.hf.tokenizer import Tokenizer
from longtail.system.device import DTYPES, own_engine_device

_log = logging.getLogger("longtail")


def open_model(
    name: str, path: Path, tokenizer: Tokenizer, dtype: str = "auto", device: str = "cpu"
) -> Target:
    """Read the weights in `path`; `auto` is the stored dtype, or float32 where that is emulated."""
    chosen = own_engine_device(device, "device")
    precision = stored_dtype(path) if dtype == "auto" else DTYPES[dtype]
    if not is_fast(precision, chosen):
        if dtype == "auto":
            precision = torch.float32
        else:
            _log.warning("%s", emulated("dtype", dtype))
    model = load_model(path, precision, chosen)
    tokenizer.limit(model.config.vocab_size)
    return Target(model=model, tokenizer=tokenizer, directory=path, name=name)


def open_engine(target: Target, limits: EngineLimits, drafter: str) -> RolloutEngine:
    """Return an engine that drafts where that is faster; see `assembly.drafters` for names."""
    engine = RolloutEngine(target.model, target.tokenizer.decode, limits)
    engine.speculate(named_speculation(drafter, target))
    return engine


def named_speculation(drafter: str, target: Target) -> Speculation | None:
    """Return speculation with the named drafters, which do not learn; None for the name "none"."""
    return open_speculation(drafter_names(drafter, target.name, learns=False), target)
