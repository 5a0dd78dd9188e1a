"""The device of a run. longtail's own engine generates on CPUs; on GPUs vLLM does."""

import torch

from longtail.config.drafter import DrafterTrainConfig
from longtail.config.rl import RunConfig
from longtail.config.sft import SftConfig
from longtail.errors import ConfigError
from longtail.system.device import choose_device

AnyConfig = RunConfig | SftConfig | DrafterTrainConfig


def own_engine_device(device: str, field: str) -> torch.device:
    """Return the CPU, where longtail's own engine generates; `auto` is the CPU, too.

    Raises ConfigError, which names the setting `field`, for a GPU.
    """
    if device not in ("auto", "cpu"):
        raise ConfigError(
            f"{field} = {device!r}: longtail's own engine generates on CPUs; on GPUs vLLM does "
            f"(docs/vllm.md): set rollout.engine = 'vllm' in longtail train, or {field} = 'cpu'"
        )
    return torch.device("cpu")


def run_device(config: AnyConfig) -> torch.device:
    """Return the device on which a run learns and, in `longtail train`, generates.

    Raises ConfigError if it does not exist or cannot generate.
    """
    if isinstance(config, RunConfig) and config.rollout.engine == "own":
        return own_engine_device(config.run.device, "run.device")
    return choose_device(config.run.device)


def worker_gpus(config: RunConfig) -> float:
    """Return the GPUs of a worker; below 1 several workers share one. Raises ConfigError."""
    if run_device(config).type == "cpu":
        return 0.0
    given = config.cluster.gpus_per_worker
    parallel = float(str((config.rollout.vllm or {}).get("tensor_parallel_size", 1)))
    if given is not None and (given < parallel if parallel > 1 else given > 1 and given % 1):
        raise ConfigError(
            f"cluster.gpus_per_worker = {given:g}: give a whole number from "
            f"rollout.vllm.tensor_parallel_size = {parallel:g} on, or for workers that share a GPU "
            "a number below 1"
        )
    return parallel if given is None else given
