"""The command `longtail view`: its options, checked, and its server, if that is installed."""

from longtail.config.command_options import MOST_RUNS, VIEW_TOKEN, ViewOptions
from longtail.errors import ConfigError
from longtail.system import machine
from longtail.system.addresses import check_address, read_secret
from longtail.view.run_files import open_runs


def run(options: ViewOptions) -> int:
    """Show runs on a web page until a signal arrives."""
    if len(options.runs) > MOST_RUNS:
        raise ConfigError(
            f"{len(options.runs)} runs: one page shows at most {MOST_RUNS}; name fewer"
        )
    token = read_secret(options.token_file, VIEW_TOKEN, "--token-file", "a token")
    remedy = f"a token is needed: set ${VIEW_TOKEN}, give --token-file"
    check_address(options.host, token, remedy)
    runs = open_runs(list(options.runs))
    try:
        from longtail.view import server
    except ImportError as error:
        raise ConfigError(
            f"longtail view needs FastAPI and uvicorn ({error}): {machine.pip_install('serve')}"
        ) from error
    return server.serve(runs, host=options.host, port=options.port, token=token)
