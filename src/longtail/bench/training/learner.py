"""`longtail bench learner`: time and memory that packing saves the learner.

The same learner steps over the same sequences in each layout of `bench.training.workload`.
"""

import multiprocessing
import resource
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from longtail.bench.common.timing import paired, pin_threads
from longtail.bench.training import step
from longtail.bench.training.options import LearnerBenchOptions
from longtail.bench.training.workload import (
    LAYOUTS,
    SMALL,
    Workload,
    benchmark_model,
    check_gap,
    largest_gap,
    print_layouts,
)
from longtail.errors import ConfigError
from longtail.model.transformer import Transformer
from longtail.rl.learner import Learner, LearnerSettings
from longtail.rl.optim import OptimizerSettings


def run(options: LearnerBenchOptions) -> int:
    """Check the gradients, measure time in turn and memory apart, print the card and JSON.

    With a model of the user's own, `bench.training.step` measures its step beside other trainers.
    """
    if options.model is not None:
        return step.run(options)
    if options.peer_python is not None:
        raise ConfigError(f"--peer-python = {options.peer_python!r}: it needs --model")
    pin_threads(options.threads)
    gap = gradient_gap(SMALL)
    check_gap(gap, 1e-10)
    work, learner = Workload.of(options), _learner(benchmark_model())
    batches = {layout: work.batch(layout) for layout in LAYOUTS}

    def update(layout: str) -> None:
        learner.step([batches[layout]])

    seconds = paired({name: partial(update, name) for name in LAYOUTS}, repeats=options.repeats)
    memory = {layout: _peak_memory_apart(work, layout) for layout in LAYOUTS}
    real = sum(map(len, work.texts()))
    figures = {
        "peak_memory_ratio": memory["padded"].step_bytes / memory["packed"].step_bytes,
        "tokens_per_second": {name: median(real / s for s in own) for name, own in seconds.items()},
        "step_bytes": {name: one.step_bytes for name, one in memory.items()},
        "idle_bytes": memory["packed"].idle_bytes,
        "gradient_gap": gap,
    }
    step_mib = {"step MiB": lambda layout: f"{memory[layout].step_bytes / 2**20:,.0f}"}
    print_layouts(
        work, options, title="learner", seconds=seconds, columns=step_mib, figures=figures
    )
    return 0


def gradient_gap(work: Workload) -> float:
    """Return the largest relative difference between the layouts' float64 updates.

    With eps = 1 AdamW's first update is g / (|g| + 1): as smooth as the gradient itself.
    """

    def update(layout: str) -> Tensor:
        model = benchmark_model(hidden=32, layers=2).double()
        learner = _learner(model, learning_rate=1.0, eps=1.0)
        start = _flat(learner)
        learner.step([work.batch(layout)])
        return _flat(learner) - start

    return largest_gap(update)


def _flat(learner: Learner) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in learner.weights().tensors.values()])


def _learner(model: Transformer, *, learning_rate: float = 1e-6, eps: float = 1e-8) -> Learner:
    optimizer = OptimizerSettings(learning_rate=learning_rate, eps=eps)
    return Learner(model, LearnerSettings(loss="dapo", optimizer=optimizer))


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Resident memory of a learning process: before its first step, and at its peak."""

    idle_bytes: int
    peak_bytes: int

    @property
    def step_bytes(self) -> int:
        """Bytes of the step itself: activations, gradients, optimizer state."""
        return self.peak_bytes - self.idle_bytes


def _peak_memory_apart(work: Workload, layout: str) -> Memory:
    """Measure in a fresh process: a high-water mark never falls."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
        return pool.submit(_peak_memory, work, layout).result()


def _peak_memory(work: Workload, layout: str) -> Memory:
    pin_threads(work.threads)
    learner, batch = _learner(benchmark_model()), work.batch(layout)
    idle = _resident_bytes("VmRSS")
    learner.step([batch])
    return Memory(idle_bytes=idle, peak_bytes=_resident_bytes("VmHWM"))


def _resident_bytes(field: str) -> int:
    """Read VmRSS (now) or VmHWM (peak) of this process; without /proc, the peak for both."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
