"""Construction of an engine for `longtail generate` and `longtail serve`."""

from collections.abc import Callable
from pathlib import Path

import torch

from longtail.build.drafters import Target, drafter_names, open_drafters
from longtail.engine.engine import RolloutEngine
from longtail.engine.limits import EngineLimits
from longtail.engine.speculation.speculator import Speculation
from longtail.model.hf.model import load_model
from longtail.model.hf.tokenizer import Tokenizer, check_vocabulary
from longtail.sampling import noise_key
from longtail.system.device import DTYPES, choose_device, to_stderr
from longtail.tuner.budget import BudgetTuner


def open_model(
    name: str,
    path: Path,
    tokenizer: Tokenizer,
    dtype: str | None,
    device: str = "cpu",
    *,
    batch_invariant: bool = False,
) -> Target:
    """Read the weights in `path`; a dtype of None is the stored one.

    `batch_invariant` keeps a text's bits from depending on its batch on a GPU, too.
    """
    precision: torch.dtype | None = DTYPES[dtype] if dtype else None
    model = load_model(path, precision, choose_device(device))
    model.batch_invariant = batch_invariant
    check_vocabulary(tokenizer, model.config)
    return Target(model=model, tokenizer=tokenizer, directory=path, name=name)


def open_engine(
    target: Target, limits: EngineLimits, drafter: str, log: Callable[[str], None] = to_stderr
) -> RolloutEngine:
    """Return an engine that drafts where that is faster; see `build.drafters` for names."""
    engine = RolloutEngine(target.model, target.tokenizer.decode, limits)
    drafters = open_drafters(drafter_names(drafter, target, learns=False), target, log)
    if drafters:
        engine.speculate(Speculation(drafters=drafters, tuner=BudgetTuner()))
    return engine


def completion_key(seed: int, index: int) -> int:
    """Return the noise key of the index-th completion of a prompt.

    One rule for everyone who writes: `longtail serve` answers a seed with the text that
    `longtail generate` writes for it.
    """
    return noise_key(seed, "generate", index)
