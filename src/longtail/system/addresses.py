"""Addresses and secrets of the programs that serve HTTP."""

import ipaddress
import os
import socket
from pathlib import Path
from urllib.parse import urlsplit

from longtail.errors import ConfigError

_MIN_SECRET_LEN = 16


def is_loopback(host: str) -> bool:
    """Return whether a host name or address is this machine's own, without a name lookup."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_loopback_header(host: str) -> bool:
    """Return whether a Host header, which may have a port, names this machine."""
    try:
        return is_loopback(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return False


def check_address(host: str, secret: str | None, remedy: str) -> None:
    """Raise ConfigError if other machines reach a server without a secret.

    Example of a remedy: "an API key is needed: set $KEY"
    """
    if secret is None and not is_loopback(host):
        raise ConfigError(
            f"--host = {host!r} is reached from other machines, so {remedy}, or bind to 127.0.0.1"
        )


def bind(host: str, port: int) -> socket.socket:
    """Return a bound TCP socket. Raises ConfigError if the address is unknown or taken."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(
            f"--host = {host!r} is not an address of this machine ({error}): give one of its own"
        ) from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"--host = {host!r}, --port = {port}: cannot be bound ({error.strerror}); is another "
            "server running there? --port 0 takes any free port"
        ) from error
    return sock


def url(host: str, sock: socket.socket) -> str:
    """Return the URL of a socket bound to `host`, without a path."""
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{sock.getsockname()[1]}"


def read_secret(file: str | None, variable: str, option: str, what: str) -> str | None:
    """Read a secret from a file or the environment, where other processes cannot see it."""
    if file is not None:
        try:
            key, source = Path(file).read_text(encoding="utf-8").strip(), f"{option} {file}"
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{option} = {file!r} cannot be read ({error})") from error
    elif variable in os.environ:
        key, source = os.environ[variable].strip(), f"${variable}"
    else:
        return None
    if len(key) < _MIN_SECRET_LEN or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(
            f"{source}: {what} has at least {_MIN_SECRET_LEN} printable ASCII characters, no "
            'blanks; make one: python -c "import secrets; print(secrets.token_urlsafe(32))"'
        )
    return key
