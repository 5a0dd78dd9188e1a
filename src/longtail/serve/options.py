"""Options of `longtail serve`, checked, without torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from longtail.config.options import Option
from longtail.config.sections import Dtype
from longtail.errors import ConfigError

KEY_VARIABLE = "LONGTAIL_API_KEY"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """The model to serve, its address and its limits."""

    model: Annotated[
        str, Option("model, named as model.path of train", "RUN_OR_MODEL", positional=True)
    ]
    name: Annotated[
        str, Option("the model's name for clients (default: the last part of RUN_OR_MODEL)")
    ] = ""
    drafter: Annotated[str, Option("as speculation.drafter of train")] = "auto"
    host: Annotated[str, Option("any address but loopback needs an API key")] = "127.0.0.1"
    port: Annotated[int, Option("0: any free port", low=0, high=65535)] = 8000
    api_key_file: Annotated[
        str | None, Option(f"file with the API key (default: ${KEY_VARIABLE})", "FILE")
    ] = None
    max_running: Annotated[int, Option("completions generated at a time", low=1)] = 32
    max_queue: Annotated[int, Option("completions that may wait; more are refused", low=0)] = 128
    max_len: Annotated[int, Option("maximum tokens of prompt plus completion", low=2)] = 4096
    kv_tokens: Annotated[
        int, Option("KV memory; 0: enough for --max-running texts of --max-len", low=0)
    ] = 0
    drain_s: Annotated[
        float, Option("seconds for unfinished requests on shutdown", low=0, high=10**6)
    ] = 30.0
    dtype: Annotated[Dtype, Option("auto: as stored, or float32 where that is emulated")] = "auto"
    device: Annotated[str, Option("auto or cpu; the engine generates on CPUs")] = "auto"
    threads: Annotated[int, Option("compute threads; 0: every core", low=0)] = 0

    @property
    def served_name(self) -> str:
        """Name by which clients call the model."""
        return self.name or Path(self.model).resolve().name

    def __post_init__(self) -> None:
        """Raise ConfigError for options that do not fit each other."""
        if 0 < self.kv_tokens < self.max_len:
            raise ConfigError(
                f"--kv-tokens = {self.kv_tokens}: it cannot hold one text of --max-len = "
                f"{self.max_len} tokens; raise it, or give 0 to size it by --max-running"
            )
        if not self.served_name.isprintable():
            raise ConfigError(f"--name = {self.served_name!a}: give a name that can be printed")
