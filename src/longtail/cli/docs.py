"""Write docs/cli.md: the help of every command, as the command line prints it."""

import sys
from pathlib import Path

from longtail.cli import main as cli
from longtail.cli import parsers as cli_parsers

_TITLE = """\
# The command line

This page is written by `make docs`; a test compares it with the help of the commands.
Exit codes: 0 done, 1 failed, 2 wrong command line or configuration, 130 interrupted.
"""


def render() -> str:
    """Return the whole page."""
    helps = {"": cli.summary()}
    helps |= {f" {name}": make().format_help() for name, make in cli_parsers.parsers().items()}
    parts = [
        f"## longtail{name}\n\n```text\n{text.rstrip()}\n```\n" for name, text in helps.items()
    ]
    return "\n".join([_TITLE, *parts])


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(render(), encoding="utf-8")
