"""Two hosts for the tests of a module, or a reason why this machine cannot make them."""

from collections.abc import Iterator

import pytest

from end_to_end.workshop import EXACT, Workshop, build
from hosts.bed import Bed, bed, unavailable_because

pytest.importorskip("ray")

WORDS = (*EXACT, "--speculation.drafter=fresh+history")


@pytest.fixture(scope="session", autouse=True)
def _namespaces() -> None:
    if why := unavailable_because():
        pytest.skip(why)


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """A workshop with the run `one`: four steps of one process on this machine."""
    workshop = build(tmp_path_factory.mktemp("hosts"))
    assert workshop.train("one", "--run.steps=4", *WORDS).code == 0
    return workshop


@pytest.fixture
def hosts() -> Iterator[Bed]:
    """An empty bed."""
    with bed() as made:
        yield made
