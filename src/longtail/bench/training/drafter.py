"""`longtail bench drafter`: time that packing saves drafter training.

The same trainer steps over the same sequences in each layout of `bench.training.workload`, prefill
of the target included.
"""

from functools import partial
from statistics import median

import torch
from torch import Tensor

from longtail.bench.common.timing import Spread, paired, pin_threads
from longtail.bench.training import drafter_step
from longtail.bench.training.options import DrafterBenchOptions
from longtail.bench.training.workload import (
    LAYOUTS,
    SMALL,
    Workload,
    benchmark_model,
    check_gap,
    largest_gap,
    print_layouts,
)
from longtail.drafter.eagle.layer import EagleConfig, EagleLayer, Recipe, default_layers
from longtail.drafter.training.trainer import DrafterTrainer, TrainerSettings
from longtail.model.transformer import Transformer
from longtail.rl.optim import OptimizerSettings
from longtail.types import PackedSequences

_WINDOW = 64


def run(options: DrafterBenchOptions, work: Workload | None = None) -> int:
    """Check the gradients, measure in turn, print the card and JSON."""
    if options.model is not None:
        return drafter_step.run(options)
    pin_threads(options.threads)
    work = work or Workload.of(options)
    gap = gradient_gap(SMALL, options.recipe, options.unroll_steps)
    check_gap(gap, 1e-9)
    trainer = _trainer(benchmark_model(), options.recipe, options.unroll_steps)
    batches = {layout: _packed(work, layout) for layout in LAYOUTS}

    def step(layout: str) -> None:
        trainer.step(batches[layout])

    seconds = paired({name: partial(step, name) for name in LAYOUTS}, repeats=options.repeats)
    samples = {name: [work.sequences / s for s in own] for name, own in seconds.items()}
    figures = {
        "samples_per_second": {name: median(own) for name, own in samples.items()},
        "recipe": options.recipe,
        "unroll_steps": options.unroll_steps,
        "window": _WINDOW,
        "gradient_gap": gap,
    }
    print_layouts(
        work,
        options,
        title=f"{options.recipe} training",
        seconds=seconds,
        columns={"samples/s": lambda layout: Spread.of(samples[layout]).text(1)},
        figures=figures,
    )
    return 0


def gradient_gap(work: Workload, recipe: Recipe, unroll_steps: int) -> float:
    """Return the largest relative difference between the layouts' float64 updates.

    With eps = 1 AdamW's first update is g / (|g| + 1): as smooth as the gradient itself.
    """
    target = benchmark_model(hidden=32, layers=2).double()

    def update(layout: str) -> Tensor:
        trainer = _trainer(target, recipe, unroll_steps, learning_rate=1.0, eps=1.0)
        start = _flat(trainer.layer)
        trainer.step(_packed(work, layout))
        return _flat(trainer.layer) - start

    return largest_gap(update)


def _flat(layer: EagleLayer) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in layer.parameters()])


def _packed(work: Workload, layout: str) -> list[PackedSequences]:
    return [one.packed for one in work.batch(layout).micro_batches]


def _trainer(
    target: Transformer,
    recipe: Recipe,
    unroll_steps: int,
    *,
    learning_rate: float = 1e-6,
    eps: float = 1e-8,
) -> DrafterTrainer:
    config = EagleConfig(
        recipe=recipe,
        target=target.config,
        layers=default_layers(target.config.num_layers) if recipe == "eagle3" else (),
        window=_WINDOW,
    )
    layer = EagleLayer(config)
    layer.initialize(torch.Generator().manual_seed(2))
    target.fuse()
    optimizer = OptimizerSettings(learning_rate=learning_rate, eps=eps)
    settings = TrainerSettings(unroll_steps=unroll_steps, optimizer=optimizer)
    return DrafterTrainer(layer.to(target.dtype), target, settings)
