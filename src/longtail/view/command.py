"""The command `longtail view`: its options, checked, and its server, if that is installed."""

import argparse

from longtail.errors import ConfigError
from longtail.system import machine
from longtail.system.addresses import check_address, read_secret
from longtail.view.run_files import open_runs

TOKEN_VARIABLE = "LONGTAIL_VIEW_TOKEN"
MOST_RUNS = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    text = f"run directories of longtail train, up to {MOST_RUNS}, shown over each other"
    add("runs", metavar="RUN", nargs="+", help=text)
    add("--host", default="127.0.0.1", help="(default 127.0.0.1; any other needs a token)")
    add("--port", metavar="N", type=int, default=8001, help="0: any free port (default 8001)")
    text = f"file with the token that the page's URL needs (default: ${TOKEN_VARIABLE})"
    add("--token-file", metavar="FILE", help=text)


def run(args: argparse.Namespace) -> int:
    """Show runs on a web page until a signal arrives."""
    if len(args.runs) > MOST_RUNS:
        raise ConfigError(f"{len(args.runs)} runs: one page shows at most {MOST_RUNS}")
    token = read_secret(args.token_file, TOKEN_VARIABLE, "--token-file", "a token")
    remedy = f"a token is needed: set ${TOKEN_VARIABLE}, give --token-file"
    check_address(args.host, args.port, token, remedy)
    runs = open_runs(args.runs)
    try:
        from longtail.view import server
    except ImportError as error:
        raise ConfigError(
            f"longtail view needs FastAPI and uvicorn ({error}): {machine.pip_install('serve')}"
        ) from error
    return server.serve(runs, host=args.host, port=args.port, token=token)
