"""A model with the prompts of a run and its drafters, for benchmarks of generation."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor

from longtail.assembly.drafters import (
    FRESH,
    Target,
    drafter_names,
    located,
    open_drafter,
    weightless,
)
from longtail.assembly.engine import open_model
from longtail.assembly.precision import decided
from longtail.assembly.prompts import load_prompts
from longtail.assembly.trainer import sampling_of
from longtail.bench.card import Log
from longtail.config.rl import RunConfig
from longtail.engine.engine import RolloutEngine
from longtail.engine.request import EngineLimits
from longtail.engine.speculation.speculator import Speculation
from longtail.model.hf.tokenizer import load_tokenizer
from longtail.model.roofline import Limit, limit_of, measure
from longtail.rl.data.prompts import PromptSource
from longtail.run.base_model import model_directory
from longtail.sampling import noise_key
from longtail.speculation.drafter import Drafter, Observed
from longtail.speculation.grow import GrowingDrafter
from longtail.tuner.tuner import OffTuner
from longtail.types import Request, SamplingParams

_WARM_RUNNING = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model with prompts in the order of a run, each with a group of completions."""

    target: Target
    prompts: Sequence[tuple[int, ...]]
    sampling: SamplingParams
    group_size: int
    limit: Limit
    """Limit of this process's threads."""

    def requests(self, count: int, turn: int = 0, first: int = 0) -> list[Request]:
        """Return requests from number `first` on, group after group.

        Their noise keys follow from turn and number.
        """
        return [
            Request(
                request_id=str(index),
                prompt_tokens=self.prompts[index // self.group_size % len(self.prompts)],
                noise_key=noise_key(turn, "bench", index),
                sampling=self.sampling,
            )
            for index in range(first, first + count)
        ]

    @property
    def max_len(self) -> int:
        """Most tokens of a prompt with its completion."""
        return max(map(len, self.prompts)) + self.sampling.max_tokens


def open_subject(config: RunConfig, num_texts: int, log: Log) -> Subject:
    """Read the model of a run and the prompts of its first texts.

    Raises ConfigError or DataError, which names the field, if one cannot be read.
    """
    config = decided(config)
    directory = model_directory(config.model.path, log)
    tokenizer = load_tokenizer(directory)
    target = open_model(config.model.path, directory, tokenizer, config.rollout.dtype)
    found = load_prompts(config, tokenizer, None).train
    source = PromptSource(found, seed=config.run.seed, shuffle=config.data.shuffle)
    model = target.model
    num_prompts = -(-num_texts // config.rollout.group_size)
    return Subject(
        target=target,
        prompts=[each.prompt.tokens for each in source.take(num_prompts)],
        sampling=sampling_of(config, tokenizer),
        group_size=config.rollout.group_size,
        limit=limit_of(model.config, model.dtype, measure(model.device, model.dtype)),
    )


@final
class Drafters:
    """The drafters of a run after its first texts."""

    def __init__(self, names: str, subject: Subject, num_warm: int, log: Log) -> None:
        self._target = subject.target
        self.names = tuple(drafter_names(names, self._target.name, learns=num_warm > 0))
        self._suffixes = {
            name: weightless(name) for name in self.names if name != FRESH and not located(name)[1]
        }
        self._weights: Mapping[str, Tensor] | None = None
        """Those of a fresh drafter."""
        if num_warm:
            log(f"{num_warm} texts are written, from which the drafters learn")
            self._learn(subject, num_warm)
        for name in self.names:
            self._made(name)

    def _learn(self, subject: Subject, num_texts: int) -> None:
        """Write the first texts; a fresh drafter and those without weights learn from them."""
        statistics = self._made(FRESH).statistics() if FRESH in self.names else None
        limits = EngineLimits.of(_WARM_RUNNING, subject.max_len)
        target = subject.target
        reading = Speculation(drafters=(), tuner=OffTuner(), statistics=statistics, guarded=False)
        engine = RolloutEngine(target.model, target.tokenizer.decode, limits, speculation=reading)
        requests = subject.requests(num_texts)
        for request, done in zip(requests, engine.generate(requests), strict=True):
            tokens = [*request.prompt_tokens, *done.tokens]
            seen = Observed(
                request_id=request.request_id,
                tokens=tokens,
                start=0,
                num_tokens=len(tokens),
                prompt_len=len(request.prompt_tokens),
                is_finished=True,
            )
            for drafter in self._suffixes.values():
                drafter.observe([seen], None)
                drafter.forget(request.request_id)
        if statistics is not None:
            self._weights = statistics.take().weights(target.tokenizer.eos_ids)

    def _made(self, name: str) -> Drafter:
        if name in self._suffixes:
            return copy.deepcopy(self._suffixes[name])
        drafter = open_drafter(name, self._target)
        if name == FRESH and self._weights is not None:
            assert isinstance(drafter, GrowingDrafter), "it has weights"
            drafter.load_weights(self._weights)
        return drafter

    def open(self, names: Sequence[str]) -> tuple[Drafter, ...]:
        """Open some of the drafters for an engine of their own."""
        return tuple(self._made(name) for name in names)
