"""Write the generated pages: command line and configuration, as the program has them.

    python -m longtail.cli.docs docs/cli.md docs/configuration.md

The name of a file says which page it is.
"""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from longtail.cli import main as cli
from longtail.cli import parsers as cli_parsers
from longtail.config.tables import tables

_COMMANDS = """\
# The command line

This page is written by `make docs`; a test compares it with the help of the commands.
Exit codes: 0 done, 1 failed, 2 wrong command line or configuration, 130 interrupted.
"""
_CONFIGURATION = """\
# Configuration

This page is written by `make docs` from the configuration's own fields; a test compares them.

A run file is TOML: `key = value` under `[section]`. The same field on the command line is
`--section.key value`, which wins over the file. Everything has a default, so a run file names
only what differs. `longtail train RUN.toml --dry-run` prints the resolved whole with an estimate
of memory, and the run keeps it as `config.toml` in its directory. A wrong name or value is
answered before any work starts, with the field, the value and the remedy.

The allowed values are in the help of the commands, as text: [command line](cli.md).
"""


def commands() -> str:
    """Return the page of the command line."""
    helps = {"": cli.summary()}
    helps |= {f" {name}": make().format_help() for name, make in cli_parsers.parsers().items()}
    parts = [
        f"## longtail{name}\n\n```text\n{text.rstrip()}\n```\n" for name, text in helps.items()
    ]
    return "\n".join([_COMMANDS, *parts])


def configuration() -> str:
    """Return the page of all fields of the three configurations."""
    parts = [_CONFIGURATION]
    for command, sections in tables().items():
        parts.append(f"## {command}\n")
        for section, fields in sections.items():
            lines = [f"### `[{section}]`\n", "| key | default | meaning |", "|---|---|---|"]
            lines += [
                f"| `{field.key}` | {_default(field.default)} | {_cell(field.text)} |"
                for field in fields
            ]
            parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _default(value: object) -> str:
    """Return a default as TOML has it; a field without a value is left out of a file."""
    match value:
        case None:
            return "unset"
        case bool():
            return f"`{str(value).lower()}`"
        case str():
            return f'`"{value}"`'
        case tuple() | list():
            return f"`{list(value)}`"
    return f"`{value}`"


def _cell(text: str) -> str:
    """Return a text as one cell of a table."""
    return " ".join(text.split()).replace("|", r"\|")


PAGES: Mapping[str, Callable[[], str]] = {
    "cli.md": commands,
    "configuration.md": configuration,
}


def main(words: list[str]) -> None:
    """Write the named pages."""
    for path in map(Path, words):
        path.write_text(PAGES[path.name](), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
