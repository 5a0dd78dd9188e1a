"""Who is measured by `longtail bench rollout`: models, their prompts, their drafters."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from longtail.bench.common import grown, textmodel
from longtail.bench.rollout.coupling import answer
from longtail.bench.rollout.measure import Subject
from longtail.bench.rollout.options import Setting
from longtail.build.drafters import Target, taught
from longtail.build.trainer import TINY_REASONER, model_directory
from longtail.drafter.eagle.drafter import EagleDrafter
from longtail.drafter.eagle.layer import EagleLayer
from longtail.drafter.formats.checkpoint import load_drafter
from longtail.drafter.history import HistoryDrafter
from longtail.engine.speculation.acceptance import POSITIONS
from longtail.engine.speculation.speculator import Speculation
from longtail.model.hf.model import load_model
from longtail.model.hf.tokenizer import Tokenizer, load_tokenizer
from longtail.model.transformer import Transformer
from longtail.rl.data import tiny_task as task
from longtail.speculation.drafter import Drafter
from longtail.speculation.strategy import Strategy
from longtail.system.device import DTYPES
from longtail.types import SamplingParams

Say = Callable[[str], None]

GROUP = 8
"""Completions of a prompt, as in a group of training: history sees its siblings."""
_PROMPTS = 32
_MAX_TOKENS = 1024
_LONG_STEPS = 80
"""Steps of a walk whose careful solution has well over a thousand tokens."""


def make_subject(name: str, setting: Setting, say: Say) -> Subject:
    """Load or make a model, its drafters and its prompts."""
    if name == "text":
        return _text_subject(setting, say)
    target, layers = tiny_reasoner(setting.dtype_of(name), setting.drafters, say)
    model = target.model
    if name == "100m":
        model = grown.grow_target(model, grown.LARGE)
        layers = {each: grown.grow_drafter(layer, grown.LARGE) for each, layer in layers.items()}
    return Subject(
        name=name,
        model=model,
        decode=target.tokenizer.decode,
        prompts=hailstones(target.tokenizer),
        sampling=tiny_sampling(target),
        drafters={
            each: HistoryDrafter if each == "history" else _eagle(layers[each], model)
            for each in setting.drafters
        },
    )


def tiny_reasoner(
    dtype_name: str, drafters: Sequence[str], say: Say
) -> tuple[Target, dict[str, EagleLayer]]:
    """Load the tiny reasoner and its drafters, teaching what was never taught here."""
    directory = model_directory(TINY_REASONER, say)
    dtype = DTYPES[dtype_name]
    tokenizer = load_tokenizer(directory)
    model = load_model(directory, dtype)
    target = Target(model=model, tokenizer=tokenizer, directory=directory, name=TINY_REASONER)
    layers = {}
    for recipe in drafters:
        if recipe != "history":
            path = taught(target, recipe, say)
            loaded = load_drafter(path, model, tokenizer, strict_weights=False, dtype=dtype)
            layers[recipe] = loaded.layer
    return target, layers


def _eagle(
    layer: EagleLayer, model: Transformer, window: int | None = None
) -> Callable[[], Drafter]:
    return lambda: EagleDrafter(copy.deepcopy(layer), model, window=window)


def tiny_sampling(target: Target) -> SamplingParams:
    """Plain sampling up to the end of an answer."""
    return SamplingParams(max_tokens=_MAX_TOKENS, stop_token_ids=target.tokenizer.eos_ids)


def hailstones(tokenizer: Tokenizer, *, at_least: int = 0) -> list[tuple[int, ...]]:
    """Held-out problems with walks of at least so many steps, a group of each."""
    rows = [row for row in task.problems(4096, 1, "heldout") if int(row["answer"]) >= at_least][
        :_PROMPTS
    ]
    return [tokenizer.chat(row["prompt"]) for row in rows for _ in range(GROUP)]


def _text_subject(setting: Setting, say: Say) -> Subject:
    dtype = DTYPES[setting.dtype_of("text")]
    made = textmodel.ensure(say)
    tokenizer = load_tokenizer(made.target)
    model = load_model(made.target, dtype)
    loaded = load_drafter(made.drafter, model, tokenizer, strict_weights=False, dtype=dtype)
    drafters: dict[str, Callable[[], Drafter]] = {"history": HistoryDrafter}
    drafters["eagle3"] = _eagle(loaded.layer, model)
    prompts = textmodel.heldout_prompts(made, _PROMPTS)
    return Subject(
        name="text",
        model=model,
        decode=tokenizer.decode,
        prompts=[prompt for prompt in prompts for _ in range(GROUP)],
        sampling=SamplingParams(max_tokens=384),
        drafters={name: make for name, make in drafters.items() if name in setting.drafters},
    )


def length_decay(setting: Setting, say: Say) -> dict[str, Any]:
    """Accept length early and late in long texts, with the bounded window and without one."""
    target, layers = tiny_reasoner(setting.dtype_of("tiny"), ("eagle1", "eagle3"), say)
    prompts = hailstones(target.tokenizer, at_least=_LONG_STEPS)[::4]
    subject = Subject(
        name="tiny",
        model=target.model,
        decode=target.tokenizer.decode,
        prompts=prompts,
        sampling=replace(tiny_sampling(target), max_tokens=2048),
        drafters={},
    )
    found: dict[str, Any] = {}
    for name, layer in layers.items():
        for window, label in ((None, "bounded"), (0, "full")):
            drafter = _eagle(layer, target.model, window)()
            speculation = Speculation.fixed(drafter, Strategy(depth=6, size=6))
            _, acceptance = answer(subject, prompts, subject.sampling, speculation)
            spots = dict(zip(POSITIONS, acceptance.by_position(), strict=True))
            early, late = spots[50], spots[1000]
            found.setdefault(name, {})[label] = {
                "at_100": early.mean,
                "at_1000": late.mean,
                "ratio": late.mean / early.mean if early.num_verified else None,
                "num_verified": [early.num_verified, late.num_verified],
            }
            say(f"length: {name}, {label} window")
    return found
