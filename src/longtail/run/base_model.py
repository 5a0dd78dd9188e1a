"""Finds models by name; checks that a run is resumed with the base model it began with.

A checkpoint has the directory and a digest of the base, so that another one is refused when the run
is resumed or merged. `model.path` may mean another model by then: a run that went on, a repository
that changed, files that were replaced. Without adapters and KL divergence no base is needed.
"""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

from longtail.config.rl import RunConfig
from longtail.errors import ConfigError
from longtail.model.sources.hub import resolve
from longtail.run.checkpoint import policy_directory
from longtail.system.device import to_stderr
from longtail.system.files import digest

Base = Mapping[str, str]
"""Directory of a base, and the digest of its configuration and weights."""


def model_directory(
    name: str, log: Callable[[str], None] = to_stderr, *, field: str = "model.path"
) -> Path:
    """Return the Hugging Face directory of a model; that of a run is in its newest checkpoint.

    A model that is not on this machine is fetched or converted first; this can take minutes and is
    logged. Raises ConfigError that names the setting `field`.
    """
    return policy_directory(resolve(name, field, log))


def find_base(
    config: RunConfig, saved: Base | None, log: Callable[[str], None] = to_stderr
) -> tuple[Path, Base | None]:
    """Return the directory of the model of a run, and its base; None for one that needs none.

    `saved` is the base in the checkpoint. Its directory is taken as long as it exists, else what
    `model.path` means now. Raises ConfigError if that is another model.
    """
    name, own = config.model.path, config.learner
    there = None if saved is None else Path(saved["directory"])
    directory = there if there and there.is_dir() else model_directory(name, log)
    if own.lora is None and not own.kl_coef:
        return directory, None
    if saved is None:
        return directory, {"directory": str(directory.absolute()), "sha256": _digest(directory)}
    check_base(config, saved, directory)
    return directory, saved


def check_base(config: RunConfig, saved: Base, directory: Path) -> None:
    """Raise ConfigError if a directory holds another model than the base of a run."""
    if (found := _digest(directory)) != saved["sha256"]:
        reason = "learner.kl_coef refers" if config.learner.lora is None else "the adapters belong"
        raise ConfigError(
            f"model.path = {config.model.path!r}: {reason} to the model that was in "
            f"{saved['directory']} (SHA-256 {saved['sha256']:.16}), and {directory} holds another "
            f"one ({found:.16}); put that model back, or give another run.dir"
        )


def _digest(directory: Path) -> str:
    """Return the SHA-256 of the configuration and the weights of a model."""
    files = (directory / "config.json", *sorted(directory.glob("*.safetensors")))
    lines = [f"{file.name} {digest(file)}\n" for file in files]
    return hashlib.sha256("".join(lines).encode()).hexdigest()
