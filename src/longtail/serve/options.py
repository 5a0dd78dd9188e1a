"""Options of `longtail serve`, checked, without torch."""

import argparse
from dataclasses import dataclass
from pathlib import Path

from longtail.errors import ConfigError
from longtail.system.addresses import check_address, read_secret

KEY_VARIABLE, ADMIN_VARIABLE = "LONGTAIL_API_KEY", "LONGTAIL_ADMIN_TOKEN"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one call and of all calls together.

    Example: Limits(max_running=32, max_queue=128, max_len=4096, max_tokens=4096, max_choices=16,
                    max_body_kb=1024)
    """

    max_running: int = 32
    """Number of completions that are generated at a time."""
    max_queue: int = 128
    """Number of completions that may wait; more are refused with 429."""
    max_len: int = 4096
    """Maximum length of a prompt plus its completion, in tokens, within the model's positions."""
    max_tokens: int = 4096
    """Maximum length of a completion, in tokens."""
    max_choices: int = 16
    """Maximum number of completions of one call: n times its prompts."""
    kv_tokens: int = 0
    """Size of the KV memory in tokens; 0 has room for `max_running` texts of `max_len`."""
    max_body_kb: int = 1024
    """Maximum size of a request's body, in KiB."""
    body_s: float = 30.0
    """Seconds within which the body must arrive."""
    health_s: float = 10.0
    """Seconds within which a healthy engine generates a token."""
    stall_s: float = 120.0
    """Seconds without an engine step after which the engine is considered dead."""

    @property
    def max_body(self) -> int:
        """Maximum size of a request's body, in bytes."""
        return self.max_body_kb * 1024

    def __post_init__(self) -> None:
        """Raise ConfigError for limits under which no request could be served."""
        for name, (least, _) in _LIMITS.items():
            value = getattr(self, name)
            if value < least:
                raise ConfigError(f"{_option(name)} = {value}: it must be at least {least}")
        if 0 < self.kv_tokens < self.max_len:
            raise ConfigError(
                f"--kv-tokens = {self.kv_tokens}: it cannot hold one text of --max-len = "
                f"{self.max_len} tokens; raise it, or give 0 to size it by --max-running"
            )
        if self.max_choices > self.max_running + self.max_queue:
            raise ConfigError(
                f"--max-choices = {self.max_choices}: such a call would always be refused, since "
                f"--max-running + --max-queue = {self.max_running + self.max_queue}; raise "
                "--max-queue"
            )


_LIMITS = {
    "max_running": (1, "completions generated at a time"),
    "max_queue": (0, "completions that may wait; more are refused"),
    "max_len": (2, "maximum tokens of a prompt plus its completion"),
    "max_tokens": (1, "maximum tokens of a completion"),
    "max_choices": (1, "maximum completions per call, n times its prompts"),
    "kv_tokens": (0, "KV memory; 0: enough for --max-running texts of --max-len"),
    "max_body_kb": (1, "maximum size of a request, KiB"),
}
"""Smallest value and help text of each limit that is an option."""


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """The model to serve, its address, its limits and its callers.

    Example: ServeOptions(model="runs/example", drafter="auto", name="example", host="127.0.0.1",
                          port=8000, api_key=None, limits=Limits(), drain_s=30.0)
    """

    model: str
    drafter: str
    name: str
    """Name by which clients call the model."""
    host: str
    port: int
    api_key: str | None
    """None: every client that reaches the port is served, and the port is on loopback."""
    limits: Limits
    drain_s: float
    """Seconds that unfinished requests have when the server is stopped."""
    dtype: str = "auto"
    device: str = "auto"
    threads: int = 0
    batch_invariant: bool = False
    """Whether a text's bits are independent of its batch on a GPU, too, which is slower; with
    native CPU kernels they always are."""
    rl_dir: Path | None = None
    """Directory of the weights and drafters of trainers; None: trainers are not served."""
    admin_token: str | None = None
    """Token of the routes that change the service; None: open to clients on this machine."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("model", metavar="RUN_OR_MODEL", help="model, named as model.path of train")
    add("--drafter", metavar="NAME", default="auto", help="as speculation.drafter (default auto)")
    add("--name", help="the model's name for clients (default: the last part of RUN_OR_MODEL)")
    add("--host", default="127.0.0.1", help="(default 127.0.0.1; any other needs an API key)")
    add("--port", metavar="N", type=int, default=8000, help="0: any free port (default 8000)")
    add("--api-key-file", metavar="FILE", help=f"file with the API key (default: ${KEY_VARIABLE})")
    add("--rl-dir", metavar="DIR", help="serve RL trainers; weights and drafters come from DIR")
    text = f"file with the token of trainers (default: ${ADMIN_VARIABLE})"
    add("--admin-token-file", metavar="FILE", help=text)
    defaults = Limits()
    for name, (_, text) in _LIMITS.items():
        value = getattr(defaults, name)
        add(_option(name), metavar="N", type=int, default=value, help=f"{text} (default {value})")
    add("--drain-s", metavar="X", type=float, default=30.0, help="grace on shutdown (default 30)")
    dtypes = ("auto", "float32", "bfloat16", "float64")
    text = "auto (default): as stored, or float32 where that is emulated"
    add("--dtype", choices=dtypes, default="auto", help=text)
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N (default auto)")
    add("--threads", metavar="N", type=int, default=0, help="compute threads; 0: every core")
    add("--batch-invariant", action="store_true", help="as rollout.batch_invariant of train")


def read_options(args: argparse.Namespace) -> ServeOptions:
    """Check the options; the ConfigError names the wrong one."""
    if not 0 <= args.drain_s < 1e6:
        raise ConfigError(f"--drain-s = {args.drain_s}: it must be seconds, 0 or more")
    limits = Limits(**{name: getattr(args, name) for name in _LIMITS})
    name = args.name or Path(args.model).resolve().name
    if not name.isprintable():
        raise ConfigError(f"--name = {name!a}: give a name that can be printed")
    api_key = read_secret(args.api_key_file, KEY_VARIABLE, "--api-key-file", "an API key")
    remedy = f"an API key is needed: set ${KEY_VARIABLE}, give --api-key-file"
    check_address(args.host, args.port, api_key, remedy)
    return ServeOptions(
        model=args.model,
        drafter=args.drafter,
        name=name,
        host=args.host,
        port=args.port,
        api_key=api_key,
        limits=limits,
        drain_s=args.drain_s,
        dtype=args.dtype,
        device=args.device,
        threads=args.threads,
        batch_invariant=args.batch_invariant,
        rl_dir=None if args.rl_dir is None else Path(args.rl_dir),
        admin_token=_admin_token(args, api_key),
    )


def _admin_token(args: argparse.Namespace, api_key: str | None) -> str | None:
    """Read the trainers' token, if trainers are served; raise ConfigError if it is missing."""
    if args.rl_dir is None:
        if args.admin_token_file is not None:
            raise ConfigError("--admin-token-file: give --rl-dir, too, which serves trainers")
        return None
    if not Path(args.rl_dir).is_dir():
        raise ConfigError(f"--rl-dir = {args.rl_dir!r}: no such directory")
    file = args.admin_token_file
    token = read_secret(file, ADMIN_VARIABLE, "--admin-token-file", "an admin token")
    if token is None and api_key is not None:
        raise ConfigError(
            "--rl-dir with an API key: those who have the key could change the weights; set "
            f"${ADMIN_VARIABLE} or give --admin-token-file"
        )
    return token
