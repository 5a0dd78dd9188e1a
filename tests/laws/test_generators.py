"""Laws of every `Generator`, for longtail's engine; those of vLLM are in tests/vllm_wheel."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from longtail.assembly.drafters import drafter_names
from longtail.assembly.worker import open_own
from support import contract


@contextmanager
def opening(drafter: str) -> Iterator[contract.Opened]:
    asked, target = contract.plan(drafter), contract.toy_target()
    names = drafter_names(drafter, target.name, learns=True)
    yield open_own(asked, contract.LIMITS, names, target.tokenizer)


OTHERS = contract.law_1_texts_are_those_of_longtails_engine  # of this one, drafts change no text


@pytest.mark.parametrize(
    "law", [law for law in contract.LAWS if law is not OTHERS], ids=lambda law: law.__name__
)
def test_longtails_engine(law: Callable[[contract.Open], None]) -> None:
    law(opening)
