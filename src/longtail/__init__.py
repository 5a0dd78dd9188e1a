"""Reinforcement learning of reasoning models, without the long tail of rollouts.

    from longtail import Engine, SamplingParams

    engine = Engine("smollm2")
    print(engine.generate(["What is 27 + 15?"], SamplingParams(max_tokens=400))[0].text)

The names below are imported when they are first used, so `import longtail` needs no PyTorch. The
reading order of the source is in docs/architecture.md.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from longtail.api import Engine, TextStream, load_drafter, load_tokenizer
    from longtail.assembly.trainer import open_workers
    from longtail.config.rl import RunConfig
    from longtail.errors import LongtailError
    from longtail.loop import train
    from longtail.rl.advantage import dr_grpo
    from longtail.rl.packing import pack_rollouts
    from longtail.sampling import noise_key
    from longtail.types import Completion, Prompt, Request, Rollout, SamplingParams

__version__ = "0.2.0"
"""Version of the package; pyproject.toml and `longtail --version` read it here."""

__all__ = [
    "Completion",
    "Engine",
    "LongtailError",
    "Prompt",
    "Request",
    "Rollout",
    "RunConfig",
    "SamplingParams",
    "TextStream",
    "__version__",
    "dr_grpo",
    "load_drafter",
    "load_tokenizer",
    "noise_key",
    "open_workers",
    "pack_rollouts",
    "train",
]

_MODULES = {
    "Completion": "types",
    "Engine": "api",
    "LongtailError": "errors",
    "Prompt": "types",
    "Request": "types",
    "Rollout": "types",
    "RunConfig": "config.rl",
    "SamplingParams": "types",
    "TextStream": "api",
    "dr_grpo": "rl.advantage",
    "load_drafter": "api",
    "load_tokenizer": "api",
    "noise_key": "sampling",
    "open_workers": "assembly.trainer",
    "pack_rollouts": "rl.packing",
    "train": "loop",
}
"""Module of each public name, below `longtail`."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'longtail' has no attribute {name!r}")
    return getattr(import_module(f"longtail.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
