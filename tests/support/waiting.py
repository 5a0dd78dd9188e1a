"""Waiting for processes."""

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds, at most a minute."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "the condition did not hold within a minute"
        time.sleep(0.01)
