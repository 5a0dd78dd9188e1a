"""Options of `longtail serve` and what they mean, without torch."""

import argparse
import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path

from longtail.errors import ConfigError

KEY_VARIABLE = "LONGTAIL_API_KEY"
_LEAST_KEY_LEN = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one caller, and all of them together, may ask.

    Example: Limits(max_running=32, max_queue=128, max_len=4096, max_tokens=4096, max_choices=16,
                    max_body=1_048_576)
    """

    max_running: int = 32
    """Completions that are written at a time."""
    max_queue: int = 128
    """Completions that may wait for that; more are refused with 429."""
    max_len: int = 4096
    """Longest prompt plus completion, tokens; less where the model has fewer positions."""
    max_tokens: int = 4096
    """Longest completion."""
    max_choices: int = 16
    """Completions of one call: n times its prompts."""
    kv_tokens: int = 0
    """Tokens of KV memory; 0 is enough for `max_running` texts of `max_len`."""
    max_body: int = 2**20
    """Bytes of a request's body."""
    body_s: float = 30.0
    """Seconds in which it must have come."""
    health_s: float = 10.0
    """Seconds in which a healthy engine writes a token."""
    stall_s: float = 120.0
    """Seconds without an engine step after which the engine counts as dead."""

    def __post_init__(self) -> None:
        """Refuse limits under which nobody could be served."""
        for option, value, least in (
            ("--max-running", self.max_running, 1),
            ("--max-queue", self.max_queue, 0),
            ("--max-len", self.max_len, 2),
            ("--max-tokens", self.max_tokens, 1),
            ("--max-choices", self.max_choices, 1),
            ("--kv-tokens", self.kv_tokens, 0),
            ("--max-body-kb", self.max_body // 1024, 1),
        ):
            if value < least:
                raise ConfigError(f"{option} = {value}: it must be at least {least}")
        if 0 < self.kv_tokens < self.max_len:
            raise ConfigError(
                f"--kv-tokens = {self.kv_tokens}: it cannot hold one text of --max-len = "
                f"{self.max_len} tokens; raise it, or give 0 to size it by --max-running"
            )
        if self.max_choices > self.max_running + self.max_queue:
            raise ConfigError(
                f"--max-choices = {self.max_choices}: a call of so many would always be refused, "
                f"since --max-running + --max-queue = {self.max_running + self.max_queue}; raise "
                "--max-queue"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is served, where, to whom.

    Example: Setting(model="runs/example", drafter="auto", name="example", host="127.0.0.1",
                     port=8000, api_key=None, limits=Limits(), drain_s=30.0)
    """

    model: str
    drafter: str
    name: str
    """What clients call the model."""
    host: str
    port: int
    api_key: str | None
    """None: whoever reaches the port may ask, and that is this machine alone."""
    limits: Limits
    drain_s: float
    """Seconds that requests in progress get when the server is told to stop."""
    dtype: str | None = None
    device: str = "auto"
    threads: int = 0
    batch_invariant: bool = False
    """On a GPU, let no other request change a bit of a text; slower. Native kernels always do."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    default = Limits()
    add("model", metavar="RUN_OR_MODEL", help="run, checkpoint or model directory, tiny-reasoner")
    add("--drafter", metavar="NAME", default="auto", help="as speculation.drafter (default auto)")
    add("--name", help="what clients call the model (default: the last part of RUN_OR_MODEL)")
    add("--host", default="127.0.0.1", help="(default 127.0.0.1; any other needs an API key)")
    add("--port", metavar="N", type=int, default=8000, help="0: any free one (default 8000)")
    add("--api-key-file", metavar="FILE", help=f"file with the API key (default: ${KEY_VARIABLE})")
    for option, value, what in (
        ("--max-running", default.max_running, "completions written at a time"),
        ("--max-queue", default.max_queue, "completions that may wait; more are refused"),
        ("--max-len", default.max_len, "longest prompt plus completion, tokens"),
        ("--max-tokens", default.max_tokens, "longest completion, tokens"),
        ("--max-choices", default.max_choices, "completions of one call, n times its prompts"),
        (
            "--kv-tokens",
            default.kv_tokens,
            "KV memory; 0: enough for all that are written at a time",
        ),
        ("--max-body-kb", default.max_body // 1024, "largest request, KiB"),
    ):
        add(option, metavar="N", type=int, default=value, help=f"{what} (default {value})")
    add("--drain-s", metavar="X", type=float, default=30.0, help="grace on shutdown (default 30)")
    add("--dtype", choices=("float32", "bfloat16", "float64"), help="(default: as stored)")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N (default auto)")
    add("--threads", metavar="N", type=int, default=0, help="compute threads; 0: every core")
    add("--batch-invariant", action="store_true", help="as rollout.batch_invariant of train")


def read_setting(args: argparse.Namespace) -> Setting:
    """Check the options; ConfigError names the one that is wrong."""
    if not 0 <= args.port < 2**16:
        raise ConfigError(f"--port = {args.port}: it must be from 0 to 65535")
    if not 0 <= args.drain_s < 1e6:
        raise ConfigError(f"--drain-s = {args.drain_s}: it must be seconds, 0 or more")
    limits = Limits(
        max_running=args.max_running,
        max_queue=args.max_queue,
        max_len=args.max_len,
        max_tokens=args.max_tokens,
        max_choices=args.max_choices,
        kv_tokens=args.kv_tokens,
        max_body=args.max_body_kb * 1024,
    )
    name = args.name or Path(args.model).resolve().name
    if not name.isprintable():
        raise ConfigError(f"--name = {name!a}: give a name that can be printed")
    api_key = _api_key(args.api_key_file)
    if api_key is None and not is_loopback(args.host):
        raise ConfigError(
            f"--host = {args.host!r} is reached from other machines, so an API key is needed: set "
            f"${KEY_VARIABLE}, give --api-key-file, or bind to 127.0.0.1"
        )
    return Setting(
        model=args.model,
        drafter=args.drafter,
        name=name,
        host=args.host,
        port=args.port,
        api_key=api_key,
        limits=limits,
        drain_s=args.drain_s,
        dtype=args.dtype,
        batch_invariant=args.batch_invariant,
        device=args.device,
        threads=args.threads,
    )


def is_loopback(host: str) -> bool:
    """Tell whether a name or address stays on this machine, without asking a name server."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _api_key(file: str | None) -> str | None:
    """Read the key from where other processes cannot see it: a file or the environment."""
    if file is not None:
        try:
            key, source = Path(file).read_text(encoding="utf-8").strip(), f"--api-key-file {file}"
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--api-key-file = {file!r} cannot be read ({error})") from error
    elif KEY_VARIABLE in os.environ:
        key, source = os.environ[KEY_VARIABLE].strip(), f"${KEY_VARIABLE}"
    else:
        return None
    if len(key) < _LEAST_KEY_LEN or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(
            f"{source}: an API key has at least {_LEAST_KEY_LEN} printable ASCII characters, no "
            'blanks; make one: python -c "import secrets; print(secrets.token_urlsafe(32))"'
        )
    return key
