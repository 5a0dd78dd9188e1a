"""The laws of a `Generator`, on vLLM in this process's place: each worker runs one so."""

import json
from collections.abc import Callable

import pytest

from support import contract
from vllm_wheel.runs import NEEDS_VLLM, play

pytestmark = NEEDS_VLLM


OWN_NOISE = contract.law_1_texts_are_those_of_longtails_engine


@pytest.fixture(scope="module", params=["v1", "v2"])
def errors(request: pytest.FixtureRequest) -> dict[str, str]:
    """The error of each law; all are checked in one process, one engine after the other."""
    done = play("contract_laws.py", request.param)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, str] = json.loads(done.stdout)
    assert len(found) == len(contract.LAWS) - (request.param == "v2")
    return found


@pytest.mark.parametrize("law", contract.LAWS, ids=lambda law: law.__name__)
def test_vllm(law: Callable[[contract.Open], None], errors: dict[str, str]) -> None:
    if law is OWN_NOISE and law.__name__ not in errors:
        pytest.skip("the noise of V2 is vLLM's")
    assert errors[law.__name__] == ""
