"""Entry point that vLLM calls in each of its processes, and what runs there when an engine asks.

    front end    EngineArgs.create_engine_config: settings are parsed, features refused, both early
    engine core  Scheduler.__init__: the depth of drafts is chosen there, and what they gain counted
    worker       WorkerBase.__init__: functions of the model runner are checked and replaced

Imports of vLLM are inside functions: importing this module costs a fifth of a second, and an
engine without our option runs vLLM's own code. vLLM logs and ignores a plugin that fails to import;
`require` therefore asks the workers of a started engine whether the functions were replaced.
"""

import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from longtail.errors import ConfigError
from longtail.vllm import patching
from longtail.vllm.patching import KEY, VARIABLE, learning, requested

logger = logging.getLogger("vllm.plugins.longtail")  # vLLM shows what is below its own name

_FRONT_END = "vllm.engine.arg_utils"
_WORKER = "vllm.v1.worker.worker_base"
_CORE, _SCHEDULER = "vllm.v1.engine.core", "vllm.v1.core.sched.scheduler"
_METRICS = "vllm.v1.metrics.loggers"
_NOT_ACTIVE = (
    "the plugin longtail is not active in vLLM's workers; install longtail in vLLM's environment, "
    "name it in VLLM_PLUGINS if that is set, and have the engine ask for it: "
    f'additional_config={{"{KEY}": {{}}}} or {VARIABLE}=coupled'
)


@dataclass(slots=True)
class _Process:
    """Functions of vLLM that were replaced in this process, whose engines share them."""

    runner: str = ""
    """Model runner of vLLM, v1 or v2; empty: nothing was replaced."""
    workers: int = 0
    learns: bool = False


_PROCESS = _Process()


def register() -> None:
    """Hook into vLLM; called by vLLM in the front end, the engine core and each worker.

    Nothing of vLLM is imported for it: a front end whose engine asks hooks the worker later.
    """
    asked = requested(None, os.environ) is not None
    if _FRONT_END in sys.modules:
        _hook(_FRONT_END, "EngineArgs", "create_engine_config", _create_engine_config, asked)
    if asked or _WORKER in sys.modules:
        _hook(_WORKER, "WorkerBase", "__init__", _init_worker, asked)
    if asked or _CORE in sys.modules:  # the core imports the scheduler after the plugins
        _hook(_SCHEDULER, "Scheduler", "__init__", _init_scheduler, asked)


def install(config: Any) -> None:
    """Replace the functions of the model runner that `config` chooses, if it asks for it.

    Raises ConfigError if the engine asks for what is refused, or if one engine in this process asks
    for longtail and another does not: the functions are shared by all engines of a process.
    """
    settings = requested(getattr(config, "additional_config", None), os.environ)
    if _PROCESS.workers and bool(_PROCESS.runner) != (settings is not None):
        runs, asks = ("without", "for it") if settings else ("with", "for none")
        raise ConfigError(
            f"this process runs a vLLM engine {runs} longtail, and the next one asks {asks}; "
            "start it in a process of its own"
        )
    if settings is not None:
        patching.admit(config)
        if settings.drafter is not None:
            patching.check_room(config)
        from longtail.vllm import (  # they need torch
            coupled_v1,
            coupled_v2,
            learned_v1,
            learned_v2,
            learned_worker,
        )

        if not _PROCESS.runner:
            runner = "v2" if getattr(config, "use_v2_model_runner", False) else "v1"
            patching.replace((coupled_v2 if runner == "v2" else coupled_v1).patches())
            _PROCESS.runner = runner
            logger.info("longtail: coupled drafts in vLLM's %s model runner", runner)
        if settings.drafter is not None and not _PROCESS.learns:
            learned = learned_v2 if _PROCESS.runner == "v2" else learned_v1
            patching.replace([*learned.patches(), *learned_worker.patches()])
            _PROCESS.learns = True
    _PROCESS.workers += 1


def require(engine: Any) -> list[dict[str, Any]]:
    """Return the status of each worker of an LLM; ConfigError unless all have the plugin."""
    try:
        found = list(engine.collective_rpc("longtail_status"))
    except Exception as error:  # vLLM wraps a worker's AttributeError in several classes
        raise ConfigError(f"{_NOT_ACTIVE} ({error})") from error
    if not found or any(status is None for status in found):
        raise ConfigError(_NOT_ACTIVE)
    return found


def _status(worker: Any) -> dict[str, Any] | None:
    """Return the runner of a worker's process, and what its drafter has learned, if it has one.

    None if nothing is installed.
    """
    if not _PROCESS.runner:
        return None
    found: dict[str, Any] = {"runner": _PROCESS.runner}
    if _PROCESS.learns:
        from longtail.vllm.learned_worker import learned_of  # needs torch

        if (learned := learned_of(worker)) is not None:
            found["learned"] = learned.status()
    return found


def _hook(module: str, name: str, method: str, new: Callable[..., Any], asked: bool) -> None:
    """Put `new`, which takes the method of vLLM first, in its place, once.

    Where it is missing, ConfigError is raised if the plugin is asked for; otherwise it is logged,
    since the engine may not ask.
    """
    try:
        owner = getattr(import_module(module), name, None)
    except ImportError:
        owner = None
    stock = owner and getattr(owner, method, None)
    if stock is None:
        problem = f"longtail: this vLLM has no {name}.{method} in {module}"
        if asked:
            raise ConfigError(f"{problem}; use vLLM {patching.KNOWN}, or unset {VARIABLE}")
        logger.warning(problem)
    elif not hasattr(stock, "longtail_stock"):
        hooked: Any = patching.around(stock, new)
        hooked.longtail_stock = stock
        setattr(owner, method, hooked)


def _create_engine_config(stock: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Check the vllm_config of the front end and write the settings into it, for the workers."""
    asked, learned = requested(self.additional_config, os.environ), learning(self)
    if asked is not None:
        patching.check_version()
    given = "the argument speculative_config"
    if asked is not None and self.speculative_config is None:
        given = f"the variable {patching.SPECULATION_VARIABLE}"
        self.speculative_config = patching.speculation(os.environ)
    if learned is not None:
        if self.speculative_config is not None:
            raise ConfigError(
                f"longtail in vLLM: the drafter is {learned.drafter}: remove {given} "
                f"({self.speculative_config}) where the engine is made; or, to couple those "
                f"drafts, leave out drafter, or set {VARIABLE}=coupled"
            )
        # It stands in the place of vLLM's n-gram search, the drafter without a model and a
        # cache: of that on the device, with steps ahead, or, in V1, of the other.
        self.speculative_config = patching.chains("ngram_gpu", learned.depth)
    tries = learned is None or patching.may_run_v2()
    config = stock(self, *args, **kwargs) if tries else None
    if learned is not None and (config is None or not config.use_v2_model_runner):
        self.async_scheduling = False
        self.speculative_config = patching.chains("ngram", learned.depth)
        config = stock(self, *args, **kwargs)
    assert config is not None, "it is made above"
    settings = requested(config.additional_config, os.environ)
    if settings is None:
        return config
    patching.check_version(in_v2=bool(config.use_v2_model_runner))
    patching.admit(config)
    _hook(_WORKER, "WorkerBase", "__init__", _init_worker, asked=True)
    _hook(_SCHEDULER, "Scheduler", "__init__", _init_scheduler, asked=True)
    if (drafts := config.speculative_config) is not None:
        from longtail.vllm import gain_log

        gain_log.carry_gauges()
        _hook(_METRICS, "PrometheusStatLogger", "record", gain_log.record, asked=False)
        if config.use_v2_model_runner and patching.chooses_depth(config):
            # V2 captures graphs for these depths. In V1 a table here costs its full graphs.
            most = drafts.num_speculative_tokens
            drafts.num_speculative_tokens_per_batch_size = [(1, 1, most), (2, 2, 0)]
    if settings.drafter is not None:
        patching.admit_learned(config)
        if settings.begin is not None:  # before the model is loaded
            from longtail.drafter.formats.checkpoint import target_name  # needs torch

            target_name(Path(settings.begin))
    if isinstance(config.additional_config, dict):
        # A copy: the dictionary is the caller's, who may start another engine with it.
        config.additional_config = {**config.additional_config, KEY: settings.model_dump()}
    return config


def _init_worker(stock: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    type(self).longtail_status = _status
    stock(self, *args, **kwargs)
    install(self.vllm_config)


def _init_scheduler(stock: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Construct the scheduler; it chooses the depth of drafts, and counts what they gain."""
    stock(self, *args, **kwargs)
    config, drafts = self.vllm_config, self.vllm_config.speculative_config
    if requested(config.additional_config, os.environ):
        from longtail.tuner.depth import DepthTuner
        from longtail.vllm.depths import Depths, agreement
        from longtail.vllm.gain_log import carry_gauges

        carry_gauges()
        chooses = drafts is not None and patching.chooses_depth(config)
        if drafts is not None and not chooses:
            logger.info("longtail: all steps draft alike, as %s has to here", drafts.method)
        agree = agreement(config.parallel_config) if chooses else None
        Depths(self, DepthTuner() if chooses else None, agree)
