"""Options of `longtail serve`, checked, without torch."""

import argparse
from dataclasses import dataclass, fields
from pathlib import Path

from longtail.errors import ConfigError
from longtail.system.addresses import check_address, read_secret

KEY_VARIABLE = "LONGTAIL_API_KEY"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """The model to serve, its address, its limits and its callers.

    Example: ServeOptions(model="runs/example", max_running=8, api_key=None)
    """

    model: str
    name: str = ""
    """Name by which clients call the model; empty: the last part of `model`."""
    drafter: str = "auto"
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    """None: every client that reaches the port is served, and the port is on loopback."""
    max_running: int = 32
    """Number of completions that are generated at a time."""
    max_queue: int = 128
    """Number of completions that may wait; more are refused with 429."""
    max_len: int = 4096
    """Maximum length of a prompt plus its completion, in tokens, within the model's positions."""
    kv_tokens: int = 0
    """Size of the KV memory in tokens; 0 has room for `max_running` texts of `max_len`."""
    drain_s: float = 30.0
    """Seconds that unfinished requests have when the server is stopped."""
    dtype: str = "auto"
    device: str = "auto"
    threads: int = 0
    batch_invariant: bool = False
    """Whether a text's bits are independent of its batch on a GPU, too, which is slower; with
    native CPU kernels they always are."""

    @property
    def served_name(self) -> str:
        """Name by which clients call the model."""
        return self.name or Path(self.model).resolve().name

    def __post_init__(self) -> None:
        """Raise ConfigError for an option with which no request could be served."""
        least = {"max_running": 1, "max_queue": 0, "max_len": 2, "kv_tokens": 0}
        for name, smallest in least.items():
            if getattr(self, name) < smallest:
                raise ConfigError(
                    f"{_option(name)} = {getattr(self, name)}: it must be at least {smallest}"
                )
        if 0 < self.kv_tokens < self.max_len:
            raise ConfigError(
                f"--kv-tokens = {self.kv_tokens}: it cannot hold one text of --max-len = "
                f"{self.max_len} tokens; raise it, or give 0 to size it by --max-running"
            )
        if not 0 <= self.drain_s < 1e6:
            raise ConfigError(f"--drain-s = {self.drain_s}: it must be seconds, 0 or more")
        if not self.served_name.isprintable():
            raise ConfigError(f"--name = {self.served_name!a}: give a name that can be printed")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


_HELP = {
    "drafter": "as speculation.drafter",
    "host": "any address but loopback needs an API key",
    "port": "0: any free port",
    "max_running": "completions generated at a time",
    "max_queue": "completions that may wait; more are refused",
    "max_len": "maximum tokens of a prompt plus its completion",
    "kv_tokens": "KV memory; 0: enough for --max-running texts of --max-len",
    "drain_s": "seconds for unfinished requests on shutdown",
    "device": "auto, cpu, cuda or cuda:N",
    "threads": "compute threads; 0: every core",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("model", metavar="RUN_OR_MODEL", help="model, named as model.path of train")
    text = "the model's name for clients (default: the last part of RUN_OR_MODEL)"
    add("--name", default="", help=text)
    add("--api-key-file", metavar="FILE", help=f"file with the API key (default: ${KEY_VARIABLE})")
    for field in fields(ServeOptions):
        if field.name in _HELP:
            text, kind = f"{_HELP[field.name]} (default {field.default})", type(field.default)
            metavar = {int: "N", float: "X", str: "NAME"}[kind]
            add(_option(field.name), metavar=metavar, type=kind, default=field.default, help=text)
    dtypes = ("auto", "float32", "bfloat16", "float64")
    text = "auto (default): as stored, or float32 where that is emulated"
    add("--dtype", choices=dtypes, default="auto", help=text)
    add("--batch-invariant", action="store_true", help="as rollout.batch_invariant of train")


def read_options(args: argparse.Namespace) -> ServeOptions:
    """Check the options; the ConfigError names the wrong one."""
    given = vars(args).copy()
    file = given.pop("api_key_file")
    api_key = read_secret(file, KEY_VARIABLE, "--api-key-file", "an API key")
    options = ServeOptions(**given, api_key=api_key)
    remedy = f"an API key is needed: set ${KEY_VARIABLE}, give --api-key-file"
    check_address(options.host, options.port, api_key, remedy)
    return options
