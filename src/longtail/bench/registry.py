"""The benchmarks of `longtail bench`: their options and modules, without torch."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Any

from longtail.bench.common.options import add_arguments, read
from longtail.bench.e2e.options import E2eBenchOptions
from longtail.bench.engine.options import EngineBenchOptions
from longtail.bench.gpu.options import GpuBenchOptions
from longtail.bench.recipes.options import RecipesBenchOptions
from longtail.bench.rollout.options import RolloutBenchOptions
from longtail.bench.serve.options import ServeBenchOptions
from longtail.bench.training.options import DrafterBenchOptions, LearnerBenchOptions
from longtail.bench.trl.options import TrlBenchOptions
from longtail.bench.tuner.options import TunerBenchOptions
from longtail.bench.vllm.options import VllmBenchOptions

__all__ = ["BENCHES", "Bench"]


@dataclass(frozen=True, slots=True)
class Bench:
    """One benchmark; its module has `run(options) -> exit code`."""

    summary: str
    options: type
    module: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the options."""
        add_arguments(parser, self.options)

    def run(self, args: argparse.Namespace) -> int:
        """Read the options, then import and run the benchmark."""
        options: Any = read(self.options, args)
        code: int = import_module(f"longtail.bench.{self.module}").run(options)
        return code


BENCHES: Mapping[str, Bench] = MappingProxyType(
    {
        "engine": Bench(
            "Compare the rollout engine with transformers, vLLM and the bare matrix products.",
            EngineBenchOptions,
            "engine.run",
        ),
        "rollout": Bench(
            "Measure the speedup of speculative decoding with fixed strategies.",
            RolloutBenchOptions,
            "rollout.run",
        ),
        "tuner": Bench(
            "Compare the adaptive strategy with every fixed strategy.",
            TunerBenchOptions,
            "tuner.run",
        ),
        "learner": Bench(
            "Compare packed with padded batches in the learner.",
            LearnerBenchOptions,
            "training.learner",
        ),
        "drafter": Bench(
            "Compare packed with padded batches in drafter training.",
            DrafterBenchOptions,
            "training.drafter",
        ),
        "recipes": Bench(
            "Compare recipes of a fresh drafter by its acceptance after some trained tokens.",
            RecipesBenchOptions,
            "recipes.run",
        ),
        "serve": Bench(
            "Measure serving over HTTP with and without drafts, or soak the server.",
            ServeBenchOptions,
            "serve.run",
        ),
        "vllm": Bench(
            "Compare the acceptance of exported drafters in vLLM with longtail's.",
            VllmBenchOptions,
            "vllm.run",
        ),
        "trl": Bench(
            "Compare TRL's GRPO alone with TRL where longtail generates.",
            TrlBenchOptions,
            "trl.run",
        ),
        "gpu": Bench(
            "Measure kernels, steps and rollouts on a GPU against its peak.",
            GpuBenchOptions,
            "gpu.run",
        ),
        "e2e": Bench(
            "Compare whole training runs with and without drafting and spot training.",
            E2eBenchOptions,
            "e2e.run",
        ),
    }
)
"""Description, options and module of each benchmark, by name."""
