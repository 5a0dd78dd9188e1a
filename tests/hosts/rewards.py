"""A reward that a test holds back: all workers are idle meanwhile."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

from end_to_end.rewards import sevens

HOLD = "HOLD"
"""Variable with the path of a file that holds graders back while it exists."""


def held(completions: Sequence[str], **more: object) -> list[float]:
    """`sevens`, once there is no file `$HOLD`; it says so in a file beside it."""
    hold = Path(os.environ[HOLD])
    while hold.exists():
        hold.with_suffix(".reached").touch()
        time.sleep(0.02)
    return sevens(completions, **more)
