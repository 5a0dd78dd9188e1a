"""`longtail serve`: a model behind OpenAI's protocol, drafting as far as it pays."""

import argparse

from longtail.errors import ConfigError
from longtail.serve.options import read_setting
from longtail.system import machine


def run(args: argparse.Namespace) -> int:
    """Serve as the command line says; see `setting` for the options."""
    setting = read_setting(args)
    try:
        from longtail.serve import server
    except ImportError as error:
        raise ConfigError(
            f"longtail serve needs FastAPI, uvicorn and prometheus_client ({error}): "
            f"{machine.pip_install('serve')}"
        ) from error
    return server.run(setting)
