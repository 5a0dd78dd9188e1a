"""A bound on the running time of chat templates, which are programs that come with models.

transformers runs templates in Jinja's sandbox, which does not limit their time. `bounded` counts
the lines that a template executes, so that an endless template stops, at the same line on every
machine. `check_template` refuses the only operator that can take unbounded time in one line.
"""

import contextlib
import re
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from longtail.errors import DataError

MAX_LINES = 1_000_000
"""Maximum number of executed lines; a chat of a thousand messages takes about ten thousand."""
_FUNCTIONS = frozenset({"raise_exception", "strftime_now"})
"""Functions that transformers gives to every template."""
_GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")


def check_template(template: str) -> None:
    """Raise DataError for a template with a power; rendering refuses malformed templates."""
    import jinja2

    tree = _parse(template)
    if tree is not None and (power := tree.find(jinja2.nodes.Pow)):
        raise DataError(
            f"tokenizer.chat_template, line {power.lineno}: powers are refused, since their "
            "results have no bound: copy the model's own template again"
        )


def variables(template: str) -> frozenset[str]:
    """Return the variables that a template reads and does not set; none of a malformed one.

    Example: "{% set x = 1 %}{{ x }}{{ messages }}{{ raise_exception('no') }}" reads messages.
    """
    from jinja2 import meta

    tree = _parse(template)
    return frozenset(() if tree is None else meta.find_undeclared_variables(tree)) - _FUNCTIONS


def _parse(template: str) -> Any:
    """Return the syntax tree of a template; None if it is malformed."""
    import jinja2

    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        return environment.parse(_GENERATION.sub("", template))
    except (jinja2.TemplateError, RecursionError, ValueError):
        return None


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Raise DataError when templates rendered in the context have executed MAX_LINES lines."""
    left = MAX_LINES

    def count(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename != "<template>":
            return None
        left -= 1
        if left < 0:
            raise DataError(
                f"tokenizer.chat_template does not end: stopped after {MAX_LINES} lines; copy the "
                "model's own template again"
            )
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        yield
    finally:
        sys.settrace(before)
