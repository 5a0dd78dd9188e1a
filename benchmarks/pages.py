"""Write the generated pages: command line and configuration, as the program has them.

    python benchmarks/pages.py docs/cli.md docs/configuration.md

The name of a file says which page it is.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from pydantic import BaseModel

from longtail.cli.commands import COMMANDS, ConfiguredCommand
from longtail.cli.main import SUMMARY
from longtail.config import files

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
    helps = {"": SUMMARY}
    helps |= {f" {name}": each.parser(name).format_help() for name, each in COMMANDS.items()}
    parts = [
        f"## longtail{name}\n\n```text\n{text.rstrip()}\n```\n" for name, text in helps.items()
    ]
    return "\n".join([_COMMANDS, *parts])


def configuration() -> str:
    """Return the page of all fields of the three configurations."""
    parts = [_CONFIGURATION]
    for command, each in COMMANDS.items():
        if isinstance(each, ConfiguredCommand):
            parts.append(f"## longtail {command}\n")
            parts += _sections(each.config)
    return "\n".join(parts)


def _sections(model: type[BaseModel]) -> Iterator[str]:
    """Yield a table of each section."""
    section = ""
    rows: list[str] = []
    for name, info in files.fields_of(model).items():
        before, (section, _, key) = section, name.partition(".")
        if section != before:
            if rows:
                yield "\n".join([*rows, ""])
            rows = [f"### `[{section}]`\n", "| key | default | meaning |", "|---|---|---|"]
        default = "unset" if info.default is None else f"`{json.dumps(info.default)}`"
        text = " ".join((info.description or "").split()).replace("|", r"\|")
        rows.append(f"| `{key}` | {default} | {text} |")
    yield "\n".join([*rows, ""])


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
