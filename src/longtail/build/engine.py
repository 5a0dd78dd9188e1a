"""Construction of an engine for `longtail generate` and `longtail serve`."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import final

import torch

from longtail.build.drafters import Target, drafter_names, open_drafters
from longtail.engine.engine import RolloutEngine
from longtail.engine.limits import EngineLimits
from longtail.engine.speculation.speculator import Speculation
from longtail.engine.text import Decode
from longtail.model.hf.model import load_model
from longtail.model.hf.tokenizer import Tokenizer, check_vocabulary
from longtail.sampling import noise_key
from longtail.system.device import DTYPES, choose_device, to_stderr
from longtail.system.machine import MAX_INT32
from longtail.tuner.budget import BudgetTuner
from longtail.types import Request

_STEP_TOKENS = 512


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
    speculation = open_speculation(drafter, target, log)
    if speculation is not None:
        engine.speculate(speculation)
    return engine


def open_speculation(
    drafter: str, target: Target, log: Callable[[str], None] = to_stderr
) -> Speculation | None:
    """Return speculation with the named drafters; None for the name "none"."""
    drafters = open_drafters(drafter_names(drafter, target.name, learns=False), target, log)
    return Speculation(drafters=drafters, tuner=BudgetTuner()) if drafters else None


@final
class GrowingEngine:
    """An engine that is replaced by a larger one when requests do not fit it.

    Its room for a text is a multiple of `length_step` tokens, or all of the model's positions.

    Example: GrowingEngine(make, tokenizer.decode, 64).ready(requests).generate(requests)
    """

    def __init__(
        self,
        make: Callable[[EngineLimits], RolloutEngine],
        decode: Decode,
        max_running: int,
        *,
        length_step: int = 1,
        max_positions: int = MAX_INT32,
    ) -> None:
        self._make, self._decode, self._max_running = make, decode, max_running
        self._length_step, self._max_positions = length_step, max_positions
        self._engine: RolloutEngine | None = None
        self._running = self._length = 1

    def ready(self, requests: Sequence[Request]) -> RolloutEngine:
        """Return an idle engine with room for the requests; `make` is called once."""
        lengths = [len(each.prompt_tokens) + each.sampling.max_tokens for each in requests]
        running, length = min(len(requests), self._max_running), max(lengths, default=1)
        engine = self._engine
        if engine is not None and running <= self._running and length <= self._length:
            return engine
        rounded = min(
            math.ceil(length / self._length_step) * self._length_step, self._max_positions
        )
        running, length = max(running, self._running), max(length, rounded, self._length)
        limits = EngineLimits(
            max_running=running,
            max_step_tokens=max(_STEP_TOKENS, self._max_running),
            max_len=length,
        )
        if engine is None:
            self._engine = self._make(limits)
        else:
            speculation, version = engine.speculation, engine.policy_version
            engine.speculate(None)
            self._engine = RolloutEngine(
                engine.model, self._decode, limits, policy_version=version, speculation=speculation
            )
        self._running, self._length = running, length
        return self._engine


def completion_key(seed: int, index: int) -> int:
    """Return the noise key of the index-th completion of a prompt.

    One rule for everyone who writes: `longtail serve` answers a seed with the text that
    `longtail generate` writes for it.
    """
    return noise_key(seed, "generate", index)
