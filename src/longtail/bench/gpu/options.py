"""Options of `longtail bench gpu`."""

from dataclasses import dataclass
from typing import Annotated

from longtail.config.options import Json, Option
from longtail.errors import ConfigError

PARTS = ("checks", "attention", "sampling", "small", "steps", "graphs")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuBenchOptions:
    """Parts and device."""

    parts: Annotated[tuple[str, ...], Option("parts", choices=PARTS)] = PARTS
    device: Annotated[str, Option("cuda, cuda:N, or cpu with --quick", "NAME")] = "cuda"
    repeats: Annotated[int, Option("runs of each measurement", low=1, high=1000, quick=2)] = 10
    quick: Annotated[
        bool, Option("toy shapes, to try the benchmark itself, and smaller defaults:")
    ] = False
    json: Json = False

    def __post_init__(self) -> None:
        """Refuse other devices, and a CPU for real shapes."""
        if self.device == "cpu" and not self.quick:
            raise ConfigError("--device cpu: a CPU can only try the benchmark; add --quick")
        if self.device != "cpu" and not self.device.startswith("cuda"):
            raise ConfigError(f"--device = {self.device!r}: it must be cuda, cuda:N or cpu")
