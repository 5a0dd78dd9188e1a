"""Seconds on a device: a figure is the median of repeated runs, each waited for."""

import statistics
import time
from collections.abc import Callable
from typing import final

import torch


@final
class DeviceClock:
    """Times what runs on one device."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device, self._repeats = device, repeats

    def wait(self) -> None:
        """Wait for all that was launched."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, run: Callable[[], object], *, inner: int = 1) -> float:
        """Median seconds of a run, warmed up; `inner` runs are waited for together."""
        for _ in range(2):
            run()
        took = []
        for _ in range(self._repeats):
            self.wait()
            started = time.perf_counter()
            for _ in range(inner):
                run()
            self.wait()
            took.append((time.perf_counter() - started) / inner)
        return statistics.median(took)
