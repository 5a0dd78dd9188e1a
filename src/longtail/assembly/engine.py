"""Models by name, and construction of an engine for `longtail generate` and `longtail serve`."""

import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import final

import torch

from longtail.assembly.device import own_engine_device
from longtail.assembly.drafters import Target, drafter_names, open_speculation
from longtail.assembly.precision import emulated, is_fast
from longtail.engine.engine import RolloutEngine
from longtail.engine.request import EngineLimits
from longtail.engine.speculation.speculator import Speculation
from longtail.engine.text import Decode
from longtail.model.hf.model import load_model, stored_dtype
from longtail.model.hf.tokenizer import Tokenizer, check_vocabulary
from longtail.model.sources.hub import resolve
from longtail.run.checkpoint import policy_directory
from longtail.sampling import noise_key
from longtail.system.device import DTYPES, to_stderr
from longtail.system.machine import MAX_INT32
from longtail.types import Request

_log = logging.getLogger("longtail")
_STEP_TOKENS = 512


def open_model(
    name: str, path: Path, tokenizer: Tokenizer, dtype: str = "auto", device: str = "cpu"
) -> Target:
    """Read the weights in `path`; `auto` is the stored dtype, or float32 where that is emulated."""
    chosen = own_engine_device(device, "device")
    if dtype == "auto":
        stored = stored_dtype(path)
        precision = stored if is_fast(stored, chosen) else torch.float32
    else:
        precision = DTYPES[dtype]
        if not is_fast(precision, chosen):
            _log.warning("%s", emulated("dtype", dtype))
    model = load_model(path, precision, chosen)
    check_vocabulary(tokenizer, model.config)
    return Target(model=model, tokenizer=tokenizer, directory=path, name=name)


def open_engine(target: Target, limits: EngineLimits, drafter: str) -> RolloutEngine:
    """Return an engine that drafts where that is faster; see `assembly.drafters` for names."""
    engine = RolloutEngine(target.model, target.tokenizer.decode, limits)
    engine.speculate(named_speculation(drafter, target))
    return engine


def named_speculation(drafter: str, target: Target) -> Speculation | None:
    """Return speculation with the named drafters, which do not learn; None for the name "none"."""
    return open_speculation(drafter_names(drafter, target.name, learns=False), target)


@final
class GrowingEngine:
    """An engine that is replaced by a larger one when requests do not fit it.

    The longest text is a multiple of `length_step` tokens, or all of the model's positions.
    """

    def __init__(
        self,
        make: Callable[[EngineLimits], RolloutEngine],
        decode: Decode,
        *,
        max_running: int,
        length_step: int = 1,
        max_positions: int = MAX_INT32,
    ) -> None:
        self._make, self._decode = make, decode
        self._max_running, self._length_step = max_running, length_step
        self._max_positions = max_positions
        self._running = self._length = 0
        self.present: RolloutEngine | None = None
        """The engine in use; None before the first `ready`."""

    def ready(self, requests: Sequence[Request]) -> RolloutEngine:
        """Return an idle engine with room for the requests; `make` is called once."""
        lengths = [len(each.prompt_tokens) + each.sampling.max_tokens for each in requests]
        running, length = min(max(len(requests), 1), self._max_running), max(lengths, default=1)
        engine = self.present
        if engine is not None and running <= self._running and length <= self._length:
            return engine
        rounded = min(
            math.ceil(length / self._length_step) * self._length_step, self._max_positions
        )
        self._running = max(running, self._running)
        self._length = max(length, rounded, self._length)
        limits = EngineLimits(
            max_running=self._running,
            max_step_tokens=max(_STEP_TOKENS, self._max_running),
            max_len=self._length,
        )
        if engine is None:
            self.present = self._make(limits)
        else:
            speculation, version = engine.speculation, engine.policy_version
            engine.speculate(None)
            self.present = RolloutEngine(
                engine.model, self._decode, limits, policy_version=version, speculation=speculation
            )
        return self.present


def completion_key(seed: int, index: int) -> int:
    """Return the noise key of the index-th completion of a prompt.

    One rule for everyone who writes: `longtail serve` answers a seed with the text that
    `longtail generate` writes for it.
    """
    return noise_key(seed, "generate", index)


def model_directory(
    name: str, log: Callable[[str], None] = to_stderr, *, field: str = "model.path"
) -> Path:
    """Return the Hugging Face directory of a model; that of a run is in its newest checkpoint.

    A model that is not on this machine is fetched or converted first; this can take minutes and is
    logged. Raises ConfigError that names the setting `field`.
    """
    return policy_directory(resolve(name, field, log))
