"""OpenAI-compatible HTTP server for one model, and the command `longtail serve`."""

from longtail.config.command_options import API_KEY, ServeOptions
from longtail.errors import ConfigError
from longtail.system import machine
from longtail.system.addresses import check_address, read_secret


def run(options: ServeOptions) -> int:
    """Serve with the options of the command line until a signal arrives."""
    api_key = read_secret(options.api_key_file, API_KEY, "--api-key-file", "an API key")
    remedy = f"an API key is needed: set ${API_KEY}, give --api-key-file"
    check_address(options.host, api_key, remedy)
    try:
        from longtail.serve import server
    except ImportError as error:
        raise ConfigError(
            f"longtail serve needs FastAPI, uvicorn and prometheus_client ({error}): "
            f"{machine.pip_install('serve')}"
        ) from error
    return server.run(options, api_key)
