"""The command `longtail view`: imports the server only if its packages are installed."""

import argparse

from longtail.errors import ConfigError
from longtail.system import machine
from longtail.view.options import read_options
from longtail.view.run_files import open_runs


def run(args: argparse.Namespace) -> int:
    """Show runs on a web page until a signal arrives."""
    options = read_options(args)
    runs = open_runs(list(options.runs))
    try:
        from longtail.view import server
    except ImportError as error:
        raise ConfigError(
            f"longtail view needs FastAPI and uvicorn ({error}): {machine.pip_install('serve')}"
        ) from error
    return server.run(runs, options)
