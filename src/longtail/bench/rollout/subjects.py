"""Models with their prompts and drafters, for `longtail bench rollout` and others."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from longtail.assembly.drafters import Target, embedded_drafter
from longtail.assembly.models import TINY_REASONER, model_directory
from longtail.bench.common import grown, textmodel
from longtail.bench.common.own import drafter_maker, open_own
from longtail.bench.common.process import Log
from longtail.bench.rollout.options import OWN_DRAFTER, RolloutBenchOptions
from longtail.drafter.eagle.drafter import EagleDrafter
from longtail.drafter.eagle.layer import EagleLayer
from longtail.drafter.formats.checkpoint import load_drafter
from longtail.drafter.history import HistoryDrafter
from longtail.engine.engine import RolloutEngine
from longtail.engine.limits import EngineLimits
from longtail.engine.text import Decode
from longtail.model.hf.model import load_model
from longtail.model.hf.tokenizer import Tokenizer, load_tokenizer
from longtail.model.transformer import Transformer
from longtail.rl.data import tiny_task as task
from longtail.sampling import noise_key
from longtail.speculation.drafter import Drafter
from longtail.system.device import DTYPES
from longtail.types import Request, SamplingParams

GROUP = 8
"""Completions of a prompt, as in a training group, so that history drafts from siblings."""
_PROMPTS = 32
_MAX_TOKENS = 1024
_STEP_TOKENS = 17
"""Flat tokens of a request in a step: its root and the largest draft."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model with its prompts and drafters."""

    name: str
    model: Transformer
    decode: Decode
    prompts: Sequence[tuple[int, ...]]
    sampling: SamplingParams
    drafters: Mapping[str, Callable[[], Drafter]]
    """A new drafter for each turn: history must not have seen the same texts before."""

    def engine(self, running: int) -> RolloutEngine:
        """Make an engine with room for the largest draft of every running request."""
        limits = EngineLimits(
            max_running=running,
            max_step_tokens=max(512, running * _STEP_TOKENS),
            max_len=max(map(len, self.prompts)) + self.sampling.max_tokens,
        )
        return RolloutEngine(self.model, self.decode, limits)

    def requests(self) -> list[Request]:
        """Return a request for each prompt, always with the same noise keys."""
        return requests_for(self.prompts, self.sampling, seed=0)


def requests_for(
    prompts: Sequence[tuple[int, ...]], sampling: SamplingParams, seed: int
) -> list[Request]:
    """Return a request for each prompt; its noise key follows from seed and position."""
    return [
        Request(
            request_id=str(index),
            prompt_tokens=prompt,
            noise_key=noise_key(seed, "bench", index),
            sampling=sampling,
        )
        for index, prompt in enumerate(prompts)
    ]


def make_subject(name: str, dtype_name: str, drafters: Sequence[str], log: Log) -> Subject:
    """Load or train the model `tiny`, `100m` or `text` and its drafters."""
    if name == "text":
        return _text_subject(dtype_name, drafters, log)
    target, layers = tiny_reasoner(dtype_name, drafters)
    model = target.model
    if name == "100m":
        model = grown.grow_target(model, grown.LARGE)
        layers = {each: grown.grow_drafter(layer, grown.LARGE) for each, layer in layers.items()}
    return tiny_subject(name, target, model, {each: layers.get(each) for each in drafters})


def chosen_subject(name: str, options: RolloutBenchOptions, log: Log) -> Subject:
    """Return an embedded model, or the user's own with history and the given drafter."""
    dtype = options.dtype_of(name)
    if options.model is None or options.prompts is None:
        return make_subject(name, dtype, options.drafters, log)
    names = {"history": "history"}
    if options.drafter is not None:
        names[OWN_DRAFTER] = options.drafter
    return own_subject(name, options.prompts, dtype, names, log)


def own_subject(
    name: str, source: str, dtype_name: str, drafters: Mapping[str, str], log: Log
) -> Subject:
    """Return a user's own model with its prompts; drafters are named as for training."""
    own = open_own(name, source, dtype_name, _PROMPTS, log)
    target = own.target
    return Subject(
        name=name,
        model=target.model,
        decode=target.tokenizer.decode,
        prompts=[prompt for prompt in own.prompts for _ in range(GROUP)],
        sampling=tiny_sampling(target, own.max_tokens),
        drafters={key: drafter_maker(each, target, log) for key, each in drafters.items()},
    )


def tiny_subject(
    name: str, target: Target, model: Transformer, layers: Mapping[str, EagleLayer | None]
) -> Subject:
    """Return the tiny reasoner's prompts for `model`; None stands for the history drafter."""
    return Subject(
        name=name,
        model=model,
        decode=target.tokenizer.decode,
        prompts=hailstones(target.tokenizer),
        sampling=tiny_sampling(target),
        drafters={
            each: HistoryDrafter if layer is None else eagle_maker(layer, model)
            for each, layer in layers.items()
        },
    )


def tiny_reasoner(dtype_name: str, drafters: Sequence[str]) -> tuple[Target, dict[str, EagleLayer]]:
    """Load the tiny reasoner and its EAGLE drafters."""
    directory = model_directory(TINY_REASONER)
    dtype = DTYPES[dtype_name]
    tokenizer = load_tokenizer(directory)
    model = load_model(directory, dtype)
    target = Target(model=model, tokenizer=tokenizer, directory=directory, name=TINY_REASONER)
    layers = {}
    for recipe in drafters:
        if recipe != "history":
            path = embedded_drafter(target, recipe)
            loaded = load_drafter(path, model, tokenizer, strict_weights=False, dtype=dtype)
            layers[recipe] = loaded.layer
    return target, layers


def eagle_maker(
    layer: EagleLayer, model: Transformer, window: int | None = None
) -> Callable[[], Drafter]:
    """Return a function that makes a drafter with a copy of the layer."""
    return lambda: EagleDrafter(copy.deepcopy(layer), model, window=window)


def tiny_sampling(target: Target, max_tokens: int = _MAX_TOKENS) -> SamplingParams:
    """Return temperature 1 up to the end of an answer."""
    return SamplingParams(max_tokens=max_tokens, stop_token_ids=target.tokenizer.eos_ids)


def hailstones(tokenizer: Tokenizer, *, at_least: int = 0) -> list[tuple[int, ...]]:
    """Return held-out problems with walks of `at_least` steps or more, a group of each."""
    problems = task.problems(4096, 1, "heldout")
    rows = [row for row in problems if int(row["answer"]) >= at_least][:_PROMPTS]
    return [tokenizer.chat(row["prompt"]) for row in rows for _ in range(GROUP)]


def _text_subject(dtype_name: str, drafters: Sequence[str], log: Log) -> Subject:
    dtype = DTYPES[dtype_name]
    paths = textmodel.ensure(log)
    tokenizer = load_tokenizer(paths.target)
    model = load_model(paths.target, dtype)
    loaded = load_drafter(paths.drafter, model, tokenizer, strict_weights=False, dtype=dtype)
    makers = {"history": HistoryDrafter, "eagle3": eagle_maker(loaded.layer, model)}
    prompts = textmodel.heldout_prompts(paths, _PROMPTS)
    return Subject(
        name="text",
        model=model,
        decode=tokenizer.decode,
        prompts=[prompt for prompt in prompts for _ in range(GROUP)],
        sampling=SamplingParams(max_tokens=384),
        drafters={name: make for name, make in makers.items() if name in drafters},
    )
