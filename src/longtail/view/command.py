"""The command `longtail view`: its options, checked, and its server, if that is installed."""

from dataclasses import dataclass
from typing import Annotated

from longtail.config.options import Option
from longtail.errors import ConfigError
from longtail.system import machine
from longtail.system.addresses import check_address, read_secret
from longtail.view.run_files import open_runs

TOKEN_VARIABLE = "LONGTAIL_VIEW_TOKEN"
MOST_RUNS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewOptions:
    """The runs to show, and the address of the page."""

    runs: Annotated[
        tuple[str, ...],
        Option(
            f"run directories of longtail train, up to {MOST_RUNS}, shown over each other",
            "RUN",
            positional=True,
        ),
    ]
    host: Annotated[str, Option("any address but loopback needs a token")] = "127.0.0.1"
    port: Annotated[int, Option("0: any free port", low=0, high=65535)] = 8001
    token_file: Annotated[
        str | None,
        Option(
            f"file with the token that the page's URL needs (default: ${TOKEN_VARIABLE})", "FILE"
        ),
    ] = None


def run(options: ViewOptions) -> int:
    """Show runs on a web page until a signal arrives."""
    if len(options.runs) > MOST_RUNS:
        raise ConfigError(
            f"{len(options.runs)} runs: one page shows at most {MOST_RUNS}; name fewer"
        )
    token = read_secret(options.token_file, TOKEN_VARIABLE, "--token-file", "a token")
    remedy = f"a token is needed: set ${TOKEN_VARIABLE}, give --token-file"
    check_address(options.host, token, remedy)
    runs = open_runs(list(options.runs))
    try:
        from longtail.view import server
    except ImportError as error:
        raise ConfigError(
            f"longtail view needs FastAPI and uvicorn ({error}): {machine.pip_install('serve')}"
        ) from error
    return server.serve(runs, host=options.host, port=options.port, token=token)
