"""Install a wheel in a fresh environment outside the checkout and use it as a stranger does.

    python tests/package/smoke.py dist/longtail-0.2.0-py3-none-any.whl [--dependencies PYTHON]

Checks the version, `longtail doctor`, and `longtail generate` of the toy twice: with native
kernels compiled by that installation, and on a PATH without a C compiler, where PyTorch takes over
with a warning. A wheel that has kernels is used with and without a compiler, and compiles none.
Without `--dependencies` pip installs everything from its index; with it the dependencies are those
of another environment.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

MODEL = str(Path(__file__).resolve().parents[1] / "toy" / "reasoner")
GENERATE = ("generate", MODEL, "--prompt", "How many steps from 6 to 1?", "--threads=1")
SITE = "import sysconfig; print(sysconfig.get_path('purelib'))"
MISSING_COMPILER = "there is no C compiler"


class FailedError(Exception):
    """A check that failed, with the output of its command."""


class Place:
    """A fresh environment in a folder of its own, with caches of its own."""

    def __init__(self, folder: Path, *, with_pip: bool) -> None:
        self.folder = folder
        self.bin = folder / "venv" / "bin"
        venv.create(folder / "venv", with_pip=with_pip)

    def run(self, *words: str, path: str | None = None) -> str:
        """Run a program of the environment; return its output or raise FailedError."""
        kept = {name: os.environ[name] for name in os.environ if not name.startswith("PYTHON")}
        kept |= {"COLUMNS": "160", "LONGTAIL_CACHE": str(self.folder / "cache")}
        kept["PATH"] = path or f"{self.bin}:{os.environ['PATH']}"
        started = time.perf_counter()
        done = subprocess.run(
            [str(self.bin / words[0]), *words[1:]],
            cwd=self.folder,
            env=kept,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        shown = " ".join(words[:4])
        print(f"{time.perf_counter() - started:6.1f} s  {shown}", flush=True)
        if done.returncode:
            raise FailedError(f"{shown} ended with {done.returncode}:\n{done.stdout}")
        return done.stdout


def check(holds: bool, what: str, output: str) -> None:
    """Raise FailedError unless a condition holds."""
    if not holds:
        raise FailedError(f"expected {what}; the output was:\n{output}")


def install(place: Place, wheel: Path, dependencies: str | None) -> None:
    """Install the wheel, and its dependencies unless an environment has them."""
    quietly = ("--quiet", "--disable-pip-version-check")
    if dependencies is None:
        pins = Path(__file__).parents[2] / "constraints-dev.txt"
        place.run("python", "-m", "pip", "install", *quietly, "-c", str(pins), str(wheel))
        return
    pip = (dependencies, "-m", "pip", f"--python={place.bin / 'python'}", "install", *quietly)
    subprocess.run((*pip, "--no-deps", "--no-index", str(wheel)), check=True)
    asked = subprocess.run([dependencies, "-c", SITE], capture_output=True, text=True, check=True)
    own = Path(place.run("python", "-c", SITE).strip())
    (own / "dependencies.pth").write_text(asked.stdout)


def use(place: Place, wheel: Path) -> None:
    """Run the installed commands."""
    version = wheel.name.split("-")[1]
    said = place.run("python", "-c", "import longtail as x; print(x.__version__, x.__file__)")
    check(said.startswith(f"{version} {place.folder}"), "the package of the wheel", said)
    if "-any" not in wheel.name:
        use_shipped(place)
        return
    said = place.run("longtail", "doctor")
    check("built here" in said and "not ready" not in said, "kernels that were compiled", said)
    compiled = list((place.folder / "cache").rglob("kernels.so"))
    check(len(compiled) == 1, "one compiled library", str(compiled))
    said = place.run("longtail", *GENERATE)
    check("tokens/s" in said and MISSING_COMPILER not in said, "a text by native kernels", said)
    said = place.run("longtail", *GENERATE, path=str(place.bin))
    check("tokens/s" in said and MISSING_COMPILER in said, "a text and a warning", said)
    said = place.run("longtail", "doctor", path=str(place.bin))
    check("no C compiler: install one" in said, "the remedy for a missing compiler", said)


def use_shipped(place: Place) -> None:
    """Generate with the kernels of the wheel, with a compiler and without."""
    for path in (None, str(place.bin)):
        said = place.run("longtail", *GENERATE, path=path)
        check("tokens/s" in said and MISSING_COMPILER not in said, "a text by native kernels", said)
    said = place.run("longtail", "doctor", path=str(place.bin))
    check("of the wheel" in said, "kernels of the wheel", said)
    compiled = list((place.folder / "cache").rglob("kernels.so"))
    check(not compiled, "no compiled library", str(compiled))


def main() -> int:
    """Run all checks; return 1 if one fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--dependencies", metavar="PYTHON", help="environment to take them from")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="longtail-smoke-") as folder:
        try:
            place = Place(Path(folder).resolve(), with_pip=options.dependencies is None)
            install(place, options.wheel.resolve(), options.dependencies)
            use(place, options.wheel)
        except FailedError as failure:
            print(failure, file=sys.stderr)
            return 1
    print("the wheel works")
    return 0


if __name__ == "__main__":
    sys.exit(main())
