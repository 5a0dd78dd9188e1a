"""A bound on what a chat template does: templates come with models, and are programs.

transformers runs them in Jinja's sandbox, which keeps them from everything but time. `bounded`
counts the lines that a template executes, loops and macros included, so that a template that never
ends does, at the same line everywhere. `check_template` refuses the one operator whose single use
can take for ever.
"""

import contextlib
import re
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from longtail.errors import DataError

MOST_LINES = 1_000_000
"""Executed lines of one rendering; a chat of a thousand messages takes some ten thousand."""
_GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")


def check_template(template: str) -> None:
    """Raise DataError for a template that raises to a power; rendering refuses what is none."""
    import jinja2

    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        tree = environment.parse(_GENERATION.sub("", template))
    except (jinja2.TemplateError, RecursionError, ValueError):
        return
    if power := tree.find(jinja2.nodes.Pow):
        raise DataError(
            f"tokenizer.chat_template, line {power.lineno}: it raises to a power, whose result has "
            "no bound: copy the model's own template again"
        )


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Raise DataError once the templates rendered inside have executed MOST_LINES lines."""
    left = MOST_LINES

    def count(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename != "<template>":
            return None
        left -= 1
        if left < 0:
            raise DataError(
                f"tokenizer.chat_template does not end: stopped after {MOST_LINES} lines; copy the "
                "model's own template again"
            )
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        yield
    finally:
        sys.settrace(before)
