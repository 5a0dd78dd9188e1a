"""The laws of a `Generator`, on vLLM in this process's place: each worker runs one so."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import longtail
from support import contract

PYTHON = os.environ.get("LONGTAIL_VLLM_PYTHON", "")
pytestmark = pytest.mark.skipif(
    not PYTHON, reason="LONGTAIL_VLLM_PYTHON names the python of an environment with vLLM"
)
_SCRIPT = Path(__file__).with_name("contract_laws.py")


@pytest.fixture(scope="module")
def errors() -> dict[str, str]:
    """The error of each law; all are checked in one process, one engine after the other."""
    packages = (Path(longtail.__file__).parent.parent, Path(contract.__file__).parent.parent)
    done = subprocess.run(
        [PYTHON, "-I", str(_SCRIPT), *map(str, packages)],
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("law", contract.LAWS, ids=lambda law: law.__name__)
def test_vllm(law: Callable[[contract.Open], None], errors: dict[str, str]) -> None:
    assert errors[law.__name__] == ""
