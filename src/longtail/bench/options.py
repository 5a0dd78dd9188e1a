"""Options of `longtail bench e2e`, without torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from longtail.config.options import Json, Option
from longtail.errors import ConfigError

ARMS = ("off", "frozen", "spot", "cold", "all")


@dataclass(frozen=True, slots=True, kw_only=True)
class E2eBenchOptions:
    """The training run, and the arms that make it."""

    run: Annotated[str, Option("TOML file or recipe to measure", "RUN", positional=True)] = (
        "smollm2"
    )
    arms: Annotated[tuple[str, ...], Option("arms, off first", choices=ARMS)] = ("off", "all")
    steps: Annotated[int, Option("training steps of each arm, at most run.steps of RUN", low=1)] = (
        20
    )
    drafter: Annotated[str | None, Option("trained drafter (default: that of RUN)", "NAME")] = None
    plot: Annotated[
        str | None, Option("PNG file for the last step without and with longtail", "FILE")
    ] = None
    json: Json = False
    overrides: Annotated[
        tuple[str, ...], Option("--section.key VALUE sets a field of RUN, as for longtail train")
    ] = ()

    def __post_init__(self) -> None:
        """Refuse arms that cannot be compared."""
        given = ",".join(self.arms)
        if self.arms[0] != "off" or len(self.arms) < 2:
            raise ConfigError(f"--arms = {given!r}: off comes first; name another to compare")
        if len(set(self.arms)) < len(self.arms):
            raise ConfigError(f"--arms = {given!r}: name each arm once")
        if self.plot is not None and not Path(self.plot).absolute().parent.is_dir():
            raise ConfigError(f"--plot = {self.plot!r}: its directory does not exist; make it")
