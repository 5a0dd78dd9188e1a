"""Who is measured by `longtail bench rollout`: models, their prompts, their drafters."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from longtail.assemble import DTYPES, TINY_REASONER, model_directory
from longtail.bench import grown, textmodel
from longtail.bench.rollout_cells import Subject
from longtail.bench.rollout_setting import Setting
from longtail.drafter.checkpoint import load_drafter
from longtail.drafter.eagle import EagleLayer
from longtail.drafter.eagle_drafter import EagleDrafter
from longtail.drafter.history import HistoryDrafter
from longtail.drafters import Target, taught
from longtail.engine.acceptance import POSITIONS, Acceptance
from longtail.engine.engine import EngineLimits, RolloutEngine
from longtail.engine.speculate import Speculation
from longtail.model import hf
from longtail.model.transformer import Transformer
from longtail.sampling import noise_key
from longtail.speculation.drafter import Drafter, Strategy
from longtail.tiny import task
from longtail.types import Request, SamplingParams

Say = Callable[[str], None]

_GROUP = 8
"""Completions of a prompt, as in a group of training: history sees its siblings."""
_PROMPTS = 32
_MAX_TOKENS = 1024
_LONG_STEPS = 80
"""Steps of a walk whose careful solution has well over a thousand tokens."""


def make_subject(name: str, setting: Setting, say: Say) -> Subject:
    """Load or make a model, its drafters and its prompts."""
    if name == "text":
        return _text_subject(setting, say)
    target, layers = _tiny(setting.dtype_of(name), setting.drafters, say)
    model = target.model
    if name == "100m":
        model = grown.grow_target(model, grown.LARGE)
        layers = {each: grown.grow_drafter(layer, grown.LARGE) for each, layer in layers.items()}
    return Subject(
        name=name,
        model=model,
        decode=target.tokenizer.decode,
        prompts=_hailstones(target.tokenizer),
        sampling=_sampling(target),
        drafters={
            each: HistoryDrafter if each == "history" else _eagle(layers[each], model)
            for each in setting.drafters
        },
    )


def _tiny(
    dtype_name: str, drafters: Sequence[str], say: Say
) -> tuple[Target, dict[str, EagleLayer]]:
    """Load the tiny reasoner and its drafters, teaching what was never taught here."""
    directory = model_directory(TINY_REASONER, say)
    dtype = DTYPES[dtype_name]
    tokenizer = hf.load_tokenizer(directory)
    model = hf.load_model(directory, dtype)
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


def _sampling(target: Target) -> SamplingParams:
    return SamplingParams(max_tokens=_MAX_TOKENS, stop_token_ids=target.tokenizer.eos_ids)


def _hailstones(tokenizer: hf.Tokenizer, *, at_least: int = 0) -> list[tuple[int, ...]]:
    """Held-out problems with walks of at least so many steps, a group of each."""
    rows = [row for row in task.problems(4096, 1, "heldout") if int(row["answer"]) >= at_least][
        :_PROMPTS
    ]
    return [tokenizer.chat(row["prompt"]) for row in rows for _ in range(_GROUP)]


def _text_subject(setting: Setting, say: Say) -> Subject:
    dtype = DTYPES[setting.dtype_of("text")]
    made = textmodel.ensure(say)
    tokenizer = hf.load_tokenizer(made.target)
    model = hf.load_model(made.target, dtype)
    loaded = load_drafter(made.drafter, model, tokenizer, strict_weights=False, dtype=dtype)
    drafters: dict[str, Callable[[], Drafter]] = {"history": HistoryDrafter}
    drafters["eagle3"] = _eagle(loaded.layer, model)
    prompts = textmodel.heldout_prompts(made, _PROMPTS)
    return Subject(
        name="text",
        model=model,
        decode=tokenizer.decode,
        prompts=[prompt for prompt in prompts for _ in range(_GROUP)],
        sampling=SamplingParams(max_tokens=384),
        drafters={name: make for name, make in drafters.items() if name in setting.drafters},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Coupling:
    """Accept length with and without the noise, everything else equal."""

    drafter: str
    temperature: float
    coupled: float
    uncoupled: float


def coupling(subject: Subject, setting: Setting, say: Say) -> list[Coupling]:
    """Compare coupled with uncoupled drafts, chains of 6, at three temperatures."""
    found = []
    for temperature in (0.0, 0.6, 1.0):
        for name, make in subject.drafters.items():
            sampling = replace(subject.sampling, temperature=temperature, max_tokens=256)
            means = {
                coupled: _acceptance(
                    subject,
                    subject.prompts[::_GROUP],
                    sampling,
                    Speculation(
                        drafter=make(), strategy=Strategy(depth=6, size=6), coupled=coupled
                    ),
                ).overall.mean
                for coupled in (True, False)
            }
            found.append(
                Coupling(
                    drafter=name,
                    temperature=temperature,
                    coupled=means[True],
                    uncoupled=means[False],
                )
            )
        say(f"{subject.name}: coupling at temperature {temperature:g}")
    return found


def length_decay(setting: Setting, say: Say) -> dict[str, Any]:
    """Accept length early and late in long texts, with the bounded window and without one."""
    target, layers = _tiny(setting.dtype_of("tiny"), ("eagle1", "eagle3"), say)
    prompts = _hailstones(target.tokenizer, at_least=_LONG_STEPS)[::4]
    subject = Subject(
        name="tiny",
        model=target.model,
        decode=target.tokenizer.decode,
        prompts=prompts,
        sampling=replace(_sampling(target), max_tokens=2048),
        drafters={},
    )
    found: dict[str, Any] = {}
    for name, layer in layers.items():
        for window, label in ((None, "bounded"), (0, "full")):
            drafter = _eagle(layer, target.model, window)()
            speculation = Speculation(drafter=drafter, strategy=Strategy(depth=6, size=6))
            acceptance = _acceptance(subject, prompts, subject.sampling, speculation)
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


def _acceptance(
    subject: Subject,
    prompts: Sequence[tuple[int, ...]],
    sampling: SamplingParams,
    speculation: Speculation,
) -> Acceptance:
    """Answer the prompts to the end and sum up the drafts."""
    longest = max(map(len, prompts)) + sampling.max_tokens
    limits = EngineLimits(max_running=16, max_step_tokens=1024, max_len=longest)
    engine = RolloutEngine(subject.model, subject.decode, limits, speculation=speculation)
    acceptance = Acceptance()
    engine.generate(
        [
            Request(
                request_id=str(index),
                prompt_tokens=prompt,
                noise_key=noise_key(1, "bench", index),
                sampling=sampling,
            )
            for index, prompt in enumerate(prompts)
        ],
        lambda report: acceptance.add(report.verified),
    )
    return acceptance
