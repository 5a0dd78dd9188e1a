"""`longtail bench drafter`: what packing saves drafter training.

The workload is `bench.training.learner`'s: sequences of heavy-tailed lengths, in random order. The
same trainer steps over them in micro-batches of the same few sequences, end to end (packed) or
filled up to the longest (padded), and, under a budget of tokens, as many as fit: packed, padded in
order of arrival, and padded after sorting by length. One optimizer step a micro-batch set, target
prefill included. Samples are whole sequences; padding is honest as in `bench.training.learner` (it
carries no loss and is attended to by nobody). That all layouts make the same gradient is checked
in float64 before anything is measured.
"""

import argparse
from functools import partial

import torch
from torch import Tensor

from longtail.bench.common.report import Spread, finish, paired, pin_threads, ratios
from longtail.bench.training.learner import (
    LAYOUTS,
    PROMPT_LEN,
    Workload,
    benchmark_model,
    layout_batch,
)
from longtail.drafter.eagle.layer import EagleConfig, EagleLayer, Recipe, default_layers
from longtail.drafter.training.trainer import DrafterTrainer, TrainerSettings
from longtail.model.transformer import Transformer
from longtail.rl.optim import OptimizerSettings
from longtail.types import PackedSequences

_WINDOW = 64
_TOLERANCE = 1e-9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `longtail bench drafter`."""
    add = parser.add_argument
    add("--threads", type=int, default=1, help="compute threads (default 1)")
    add("--repeats", type=int, default=5, help="measured rounds (default 5)")
    add("--sequences", type=int, default=32, help="sequences a step (default 32)")
    add("--rows", type=int, default=8, help="sequences a micro-batch (default 8)")
    add("--budget", type=int, default=4096, help="tokens a micro-batch under a budget (4096)")
    add("--recipe", choices=("eagle1", "eagle3"), default="eagle3", help="default eagle3")
    add("--unroll-steps", type=int, default=4, help="depths that are trained (default 4)")
    add("--json-only", action="store_true", help="print the JSON line only")


def run(options: argparse.Namespace) -> None:
    """Check the gradients, measure in turn, print the card and JSON."""
    pin_threads(options.threads)
    work = Workload(
        sequences=options.sequences,
        rows=options.rows,
        budget=options.budget,
        threads=options.threads,
    )
    small = Workload(sequences=8, rows=4, budget=256, threads=1, scale=0.1)
    gap = gradient_gap(small, options.recipe, options.unroll_steps)
    assert gap < _TOLERANCE, f"padding changes the gradient by {gap:.1e}: the figures would be void"
    trainer = _trainer(benchmark_model(), options.recipe, options.unroll_steps)
    batches = {layout: _packed(work, layout) for layout in LAYOUTS}

    def step(layout: str) -> None:
        trainer.step(batches[layout])

    seconds = paired({name: partial(step, name) for name in LAYOUTS}, repeats=options.repeats)
    _print(work, batches, seconds, gap, options)


def gradient_gap(work: Workload, recipe: Recipe, unroll_steps: int) -> float:
    """Largest difference between layouts of a float64 update, relative to the largest update.

    With eps = 1 AdamW's first update is g / (|g| + 1): as smooth as the gradient itself.
    """
    target = benchmark_model(hidden=32, layers=2).double()
    updates = []
    for layout in LAYOUTS:
        trainer = _trainer(target, recipe, unroll_steps, learning_rate=1.0, eps=1.0)
        start = _flat(trainer.layer)
        trainer.step(_packed(work, layout))
        updates.append(_flat(trainer.layer) - start)
    largest = updates[0].abs().max().item()
    return max((updates[0] - other).abs().max().item() for other in updates[1:]) / largest


def _flat(layer: EagleLayer) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in layer.parameters()])


def _packed(work: Workload, layout: str) -> list[PackedSequences]:
    return [one.packed for one in layout_batch(work, layout).micro_batches]


def _trainer(
    target: Transformer,
    recipe: Recipe,
    unroll_steps: int,
    *,
    learning_rate: float = 1e-6,
    eps: float = 1e-8,
) -> DrafterTrainer:
    layers = default_layers(target.config.num_layers)
    config = EagleConfig(
        recipe=recipe,
        target=target.config,
        layers=layers if recipe == "eagle3" else (),
        window=_WINDOW,
    )
    layer = EagleLayer(config)
    layer.initialize(torch.Generator().manual_seed(2))
    target.fuse()
    optimizer = OptimizerSettings(learning_rate=learning_rate, eps=eps)
    settings = TrainerSettings(unroll_steps=unroll_steps, optimizer=optimizer)
    return DrafterTrainer(layer.to(target.dtype), target, settings)


def _print(
    work: Workload,
    batches: dict[str, list[PackedSequences]],
    seconds: dict[str, list[float]],
    gap: float,
    options: argparse.Namespace,
) -> None:
    """Print one row a layout, then the ratios as JSON."""
    texts = work.texts()
    lengths = sorted(len(text) - PROMPT_LEN for text in texts)
    useful = sum(len(text) for text in texts)
    samples = {name: Spread.of([len(texts) / s for s in times]) for name, times in seconds.items()}
    rows = []
    for layout in LAYOUTS:
        computed = sum(packed.num_tokens for packed in batches[layout])
        rows.append(
            [
                layout,
                str(len(batches[layout])),
                f"{1 - useful / computed:.0%}",
                samples[layout].text(1),
                samples[layout].scaled(useful / len(texts)).text(0),
            ]
        )
    packed_ratio = ratios(seconds["padded"], seconds["packed"])
    result = {
        "packed_ratio": packed_ratio.median,
        "packed_ratio_spread": packed_ratio.numbers(),
        "packed_ratio_same_budget": ratios(
            seconds["padded_budget"], seconds["packed_budget"]
        ).numbers(),
        "packed_ratio_sorted": ratios(seconds["padded_sorted"], seconds["packed_budget"]).numbers(),
        "samples_per_second": {name: spread.median for name, spread in samples.items()},
        "lengths": {"median": lengths[len(lengths) // 2], "max": lengths[-1], "sum": sum(lengths)},
        "recipe": options.recipe,
        "unroll_steps": options.unroll_steps,
        "window": _WINDOW,
        "gradient_gap": gap,
    }
    title = (
        f"{options.recipe} training: {work.sequences} sequences, median "
        f"{lengths[len(lengths) // 2]}, longest {lengths[-1]}; packed / padded "
        f"{packed_ratio.text()}x"
    )
    columns = ("layout", "micro-batches", "padding", "samples/s", "tokens/s")
    finish(title, columns, rows, result, json_only=options.json_only)


def main() -> None:
    """Run as `python -m longtail.bench.training.drafter`."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    run(parser.parse_args())


if __name__ == "__main__":
    main()
