"""vLLM as the generator of a run, and its drafter.

    none                     plain decoding
    history, phrases         vLLM's own search for earlier tokens (ngram)
    fresh, or ridge          a drafter that vLLM learns by itself, with copies (`vllm.learned`)
    a directory of EAGLE     trained by idle workers with the learner's weights

vLLM drafts with one of them. The learner's model is EAGLE's target: it has the weights that
generate, in the learner's precision, and no second copy is held.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longtail.assembly.drafters import AUTO, FRESH, WEIGHTLESS, Target, make_tuner, open_trainable
from longtail.assembly.memory_bound import vllm_arguments
from longtail.assembly.plan import RunPlan
from longtail.config.rl import RunConfig
from longtail.config.vllm_plugin import VllmSettings
from longtail.drafter.formats.checkpoint import LoadedDrafter, is_drafter, load_unbound
from longtail.drafter.kind import LEARNED
from longtail.engine.request import EngineLimits
from longtail.errors import ConfigError
from longtail.generator import Generator
from longtail.model.hf.tokenizer import Tokenizer
from longtail.model.policy import Policy
from longtail.model.transformer import Transformer
from longtail.run.drafter_store import INITIAL
from longtail.system.device import DTYPES, to_stderr
from longtail.system.machine import is_path
from longtail.tuner.depth import DepthTuner
from longtail.vllm.generator import VllmGenerator
from longtail.vllm.patching import KEY
from longtail.vllm.run_drafter import VllmDrafter, eagle_drafter


def open_vllm(
    plan: RunPlan,
    limits: EngineLimits,
    names: Sequence[str],
    tokenizer: Tokenizer,
    policy: Policy,
) -> tuple[Generator, LoadedDrafter | None]:
    """Start vLLM with the drafter among the names; return the drafter, too, if we train it.

    `policy` is the learner's model. Raises ConfigError for a drafter that vLLM cannot run.
    """
    config, directory, dtype = plan.config, plan.directory, DTYPES[plan.config.rollout.dtype]
    model = policy if isinstance(policy, Transformer) else None
    name = _one_of(names, config, has_drafters=model is not None)
    if len(names) > 1 and config.speculation.drafter != AUTO:
        to_stderr(f"vLLM drafts with one drafter, which is {name}")
    loaded = None
    if model is not None and name is not None and name != FRESH:
        target = Target(
            model=model, tokenizer=tokenizer, directory=directory, name=config.model.path
        )
        loaded = open_trainable([name], target)
    settings: dict[str, Any] = {}
    drafter, tuner = None, make_tuner(config.speculation, DepthTuner)  # without probabilities
    with tempfile.TemporaryDirectory(prefix="longtail-drafter-") as place:
        path = Path(place) / "drafter"
        if name == FRESH or (loaded is not None and loaded.kind.vllm == LEARNED):
            settings = _learning(config, loaded, path)
            loaded = None
        elif loaded is not None and model is not None:
            drafter = eagle_drafter(loaded, model, dtype, tuner, path)
        elif name is not None:
            drafter = VllmDrafter(method="ngram", tuner=tuner)
        generator = VllmGenerator(
            directory,
            tokenizer.decode,
            limits,
            dtype=dtype,
            drafter=drafter,
            options={
                "additional_config": {KEY: settings},
                **vllm_arguments(plan),
                **(config.rollout.vllm or {}),
            },
        )
    return generator, loaded


def _learning(config: RunConfig, loaded: LoadedDrafter | None, place: Path) -> dict[str, Any]:
    """Return the settings of the drafter that vLLM learns; it goes on with the run's own."""
    own = config.speculation
    if own.tuner == "off":
        return {}
    if own.tuner != "budget":
        raise ConfigError(
            f"speculation.tuner = {own.tuner!r}: vLLM's scheduler chooses the depth of the drafter "
            "that it learns; set it to 'budget', or give a directory of an EAGLE drafter"
        )
    if is_drafter(saved := Path(config.run.dir) / "drafter" / INITIAL):
        loaded, place = load_unbound(saved), saved
    elif loaded is not None:
        loaded.save(place)
    if loaded is None or loaded.kind.vllm != LEARNED:
        return {"drafter": LEARNED}
    depth = min(loaded.layer.config.max_depth or VllmSettings().depth, VllmSettings().depth)
    return {"drafter": LEARNED, "begin": str(place), "depth": depth}


def _one_of(names: Sequence[str], config: RunConfig, *, has_drafters: bool) -> str | None:
    """Return the drafter that vLLM runs, the first of several.

    `has_drafters`: the model is one of those that longtail's drafters can read.
    """
    given, name = config.speculation.drafter, names[0] if names else None
    if given == AUTO and name is not None and not has_drafters:
        return FRESH
    if name is None or name in (*WEIGHTLESS, FRESH) or (has_drafters and not is_path(name)):
        return name
    raise ConfigError(
        f"speculation.drafter = {given!r}: vLLM runs no class of yours, and ours need longtail's "
        "decoder (learner.model = 'own'); set it to 'fresh', 'history' or 'none'"
    )
