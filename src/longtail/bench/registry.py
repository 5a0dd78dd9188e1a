"""The benchmarks of `longtail bench`: their options and modules, without torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from longtail.bench import options as options_of
from longtail.bench.gpu.options import GpuBenchOptions

__all__ = ["BENCHES", "Bench"]


@dataclass(frozen=True, slots=True)
class Bench:
    """One benchmark; its module has `run(options) -> exit code`."""

    summary: str
    options: type
    module: str


BENCHES: Mapping[str, Bench] = MappingProxyType(
    {
        "e2e": Bench(
            "Compare a training run with and without drafting and spot training.",
            options_of.E2eBenchOptions,
            "e2e.run",
        ),
        "engine": Bench(
            "Compare generation: plain, with fixed drafts, tuned, in transformers and in vLLM.",
            options_of.EngineBenchOptions,
            "engine",
        ),
        "learner": Bench(
            "Compare a learner step with its matrix products and with other trainers.",
            options_of.LearnerBenchOptions,
            "learner",
        ),
        "trl": Bench(
            "Compare TRL's GRPO alone with TRL where longtail generates.",
            options_of.TrlBenchOptions,
            "trl",
        ),
        "vllm": Bench(
            "Compare rules of drafting in vLLM, with longtail's plugin and without.",
            options_of.VllmBenchOptions,
            "vllm",
        ),
        "gpu": Bench(
            "Measure kernels and steps on a GPU against its peak.",
            GpuBenchOptions,
            "gpu.run",
        ),
    }
)
"""Description, options and module of each benchmark, by name."""
