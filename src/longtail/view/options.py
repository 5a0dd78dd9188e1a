"""Options of `longtail view`, checked."""

import argparse
from dataclasses import dataclass

from longtail.errors import ConfigError
from longtail.system.addresses import check_address, read_secret

TOKEN_VARIABLE = "LONGTAIL_VIEW_TOKEN"
MOST_RUNS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewOptions:
    """The runs to show, and the address of the page.

    Example: ViewOptions(runs=("runs/on", "runs/off"), host="127.0.0.1", port=8001, token=None)
    """

    runs: tuple[str, ...]
    host: str
    port: int
    token: str | None
    """None: every client that reaches the port is answered, and the port is on loopback."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    text = f"run directories of longtail train, up to {MOST_RUNS}, shown over each other"
    add("runs", metavar="RUN", nargs="+", help=text)
    add("--host", default="127.0.0.1", help="(default 127.0.0.1; any other needs a token)")
    add("--port", metavar="N", type=int, default=8001, help="0: any free port (default 8001)")
    text = f"file with the token that the page's URL needs (default: ${TOKEN_VARIABLE})"
    add("--token-file", metavar="FILE", help=text)


def read_options(args: argparse.Namespace) -> ViewOptions:
    """Check the options; the ConfigError names the wrong one."""
    if len(args.runs) > MOST_RUNS:
        raise ConfigError(f"{len(args.runs)} runs: one page shows at most {MOST_RUNS}")
    token = read_secret(args.token_file, TOKEN_VARIABLE, "--token-file", "a token")
    remedy = f"a token is needed: set ${TOKEN_VARIABLE}, give --token-file"
    check_address(args.host, args.port, token, remedy)
    return ViewOptions(runs=tuple(args.runs), host=args.host, port=args.port, token=token)
