"""OpenAI-compatible HTTP server for one model, and the command `longtail serve`."""

import argparse

from longtail.errors import ConfigError
from longtail.serve.options import read_options
from longtail.system import machine


def run(args: argparse.Namespace) -> int:
    """Serve with the options of the command line until a signal arrives."""
    options = read_options(args)
    try:
        from longtail.serve import server
    except ImportError as error:
        raise ConfigError(
            f"longtail serve needs FastAPI, uvicorn and prometheus_client ({error}): "
            f"{machine.pip_install('serve')}"
        ) from error
    return server.run(options)
