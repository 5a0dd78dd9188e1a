"""Room for the arms of `longtail bench e2e`: their memory, estimated before any work.

    an arm at rest    processes, generating weights, KV cache, drafter; its learner unless parked
    its step          gradients, activations, scores, the copy that is published

All arms are at rest but one, which takes its step. If they do not fit, every arm is parked on disk
between its steps: the weights and moments of its learner, and its KV cache is given up. All or
none, so that the arms stay comparable; and a step's time includes neither parking nor its end.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from longtail.assembly import memory
from longtail.config.rl import RunConfig
from longtail.errors import ConfigError
from longtail.model.transformer import ModelConfig
from longtail.system import machine

_PROCESS_BYTES = 330_000_000
"""Memory of a worker's process without a model: Python, PyTorch, Ray."""
_LIBRARIES_BYTES = 300_000_000
"""Memory of libraries that are loaded once, when an arm first computes."""
_RAY_BYTES = 600_000_000
"""Memory of Ray's own processes."""
_LEARNER = ("master_weights", "optimizer_moments")
_AT_REST = ("rollout_weights", "packed_matrices", "reference_model", "drafter")
_COSTLY = {
    "activations": "learner.tokens_per_micro_batch",
    "kv_cache": "rollout.max_running or rollout.max_tokens",
    "scores": "learner.tokens_per_micro_batch",
}
"""Field to lower for a large use of memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmBytes:
    """Memory of an arm, of all its workers.

    Example: ArmBytes(rest=2_000_000_000, parked=3_800_000_000, step=9_000_000_000, largest=...)
    """

    rest: int
    """Bytes between two steps, parked."""
    parked: int
    """Bytes that parking frees."""
    step: int
    """Bytes of a step, beside those."""
    largest: str
    """Field of the configuration behind the largest use in a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Memory of all arms, and whether they are parked."""

    needed: int
    available: int | None
    """Bytes that the arms may take; None if unknown."""
    is_parked: bool

    def sentence(self) -> str:
        """Return what the card says about memory."""
        free = "" if self.available is None else f" of {_gb(self.available)}"
        how = "parked on disk between their steps" if self.is_parked else "all in memory"
        return f"memory: at most {_gb(self.needed)}{free}; arms are {how}"


def make_room(
    arms: Mapping[str, ArmBytes], available: int | None, *, can_park: bool, shared: int = 0
) -> Room:
    """Choose how the arms live together; `shared` bytes are used once.

    Raises ConfigError, with the numbers, if they do not fit even parked.
    """
    resident = shared + sum(each.rest + each.parked for each in arms.values())
    resident += max(each.step for each in arms.values())
    if available is None or resident <= available:
        return Room(needed=resident, available=available, is_parked=False)
    parked = shared + sum(each.rest for each in arms.values())
    parked += max(each.parked + each.step for each in arms.values())
    if can_park and parked <= available:
        return Room(needed=parked, available=available, is_parked=True)
    raise ConfigError(_refusal(arms, available, resident, parked if can_park else None))


def _refusal(
    arms: Mapping[str, ArmBytes], available: int, resident: int, parked: int | None
) -> str:
    """Return the message for arms that do not fit."""
    largest = max(arms.values(), key=lambda each: each.parked + each.step)
    one = largest.rest + largest.parked + largest.step
    also = "" if parked is None else f", {_gb(parked)} with arms parked on disk"
    fewer = "" if one > available else ", or measure fewer arms"
    return (
        f"--arms = {','.join(arms)}: they need at most {_gb(resident)}{also}, and "
        f"{_gb(available)} are there; one arm alone needs {_gb(one)}, of which {_gb(largest.step)} "
        f"in a step; lower {largest.largest}{fewer}; or, since estimates are high, give --memory GB"
    )


def arm_bytes(config: RunConfig, shape: ModelConfig, *, on_cpu: bool) -> ArmBytes:
    """Estimate the memory of an arm."""
    found = memory.estimate(config, shape, on_cpu=on_cpu).items
    workers = config.cluster.workers
    rest = sum(found[each].bytes for each in _AT_REST if each in found)
    rest += _PROCESS_BYTES if workers > 1 else 0
    learner = sum(found[each].bytes for each in _LEARNER if each in found)
    kv_cache = found.pop("kv_cache").bytes
    step = {key: item for key, item in found.items() if key not in (*_AT_REST, *_LEARNER)}
    largest = max(step, key=lambda key: step[key].bytes)
    return ArmBytes(
        rest=workers * rest,
        parked=workers * (learner + kv_cache),
        step=workers * sum(item.bytes for item in step.values()),
        largest=_COSTLY.get(largest, "rollout.max_running"),
    )


def room_for(
    configs: Mapping[str, RunConfig], shape: ModelConfig, available: int | None, *, on_cpu: bool
) -> Room:
    """Estimate all arms and choose how they live together; see `make_room`."""
    arms = {name: arm_bytes(own, shape, on_cpu=on_cpu) for name, own in configs.items()}
    several = any(own.cluster.workers > 1 for own in configs.values())
    sharded = any(own.is_sharded for own in configs.values())
    shared = _LIBRARIES_BYTES + (_RAY_BYTES if several else 0)
    return make_room(arms, available, can_park=not sharded, shared=shared)


def check_disk(configs: Mapping[str, RunConfig], shape: ModelConfig, place: Path) -> None:
    """Check that the parked learners fit on the disk. Raises ConfigError."""
    needed = 0
    for own in configs.values():
        found = memory.estimate(own, shape).items
        needed += sum(found[each].bytes for each in _LEARNER)
    free, kind = machine.disk_free(place), machine.file_system(place)
    if kind == "tmpfs":
        raise ConfigError(
            f"{place} is in memory ({kind}), and arms are parked on disk; set TMPDIR to a "
            "directory on a disk"
        )
    if needed > free:
        raise ConfigError(
            f"{place}: parked arms need {_gb(needed)}, and {_gb(free)} are free on its disk; set "
            "TMPDIR to a directory with more"
        )


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
