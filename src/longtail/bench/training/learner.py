"""`longtail bench learner`: what packing saves the learner, in time and in memory.

Lengths follow a heavy tail: quantiles of a lognormal, the longest 13 times the median. The same
learner steps over the same sequences, cut and laid out in five ways:

    packed, padded                 the same few sequences a micro-batch, in order of arrival, end to
                                   end or padded to the longest of them
    packed, padded under a budget  as many sequences a micro-batch as its tokens, padding included,
                                   allow; in order of arrival when padded
    padded, sorted                 as before, sorted by length first: the best that padding can do

Padding here is honest: one batched attention call a micro-batch, padding masked by causality (it
comes last), the LM head on real rows only. Only real tokens count as tokens/s. That all layouts
make the same gradient is checked in float64 before anything is measured.
"""

import argparse
import multiprocessing
import resource
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import NormalDist

import torch
from torch import Tensor

from longtail.bench.common.report import Spread, finish, paired, pin_threads, ratios
from longtail.model.transformer import ModelConfig, Transformer
from longtail.rl.learner import Learner, LearnerSettings
from longtail.rl.optim import OptimizerSettings
from longtail.rl.packing import lay_out, plan
from longtail.types import MicroBatch, PackedSequences, SamplingParams, TrainBatch

PROMPT_LEN = 16
MEDIAN, SIGMA = 110, 1.2
VOCAB_SIZE = 512
LAYOUTS = ("packed", "padded", "packed_budget", "padded_budget", "padded_sorted")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is measured; small enough to hand to another process.

    Example: Workload(sequences=32, rows=8, budget=4096, threads=1)
    """

    sequences: int
    rows: int
    """Sequences a micro-batch, for `packed` and `padded`."""
    budget: int
    """Tokens a micro-batch, for the layouts under a budget."""
    threads: int
    scale: float = 1.0
    """Multiplies the lengths."""

    def texts(self) -> list[tuple[int, ...]]:
        """Random sequences of heavy-tailed lengths, in random order, the same every time."""
        generator = torch.Generator().manual_seed(0)
        quantiles = [(i + 0.5) / self.sequences for i in range(self.sequences)]
        normal = NormalDist(sigma=SIGMA)
        factors = torch.tensor([normal.inv_cdf(q) for q in quantiles]).exp() * MEDIAN * self.scale
        lengths = factors.round().clamp(min=1).int().tolist()
        order = torch.randperm(self.sequences, generator=generator).tolist()
        return [
            tuple(
                torch.randint(VOCAB_SIZE, (PROMPT_LEN + lengths[i],), generator=generator).tolist()
            )
            for i in order
        ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `longtail bench learner`."""
    parser.add_argument("--threads", type=int, default=1, help="compute threads (default 1)")
    parser.add_argument("--repeats", type=int, default=5, help="measured rounds (default 5)")
    parser.add_argument("--sequences", type=int, default=32, help="sequences a step (default 32)")
    parser.add_argument("--rows", type=int, default=8, help="sequences a micro-batch (default 8)")
    parser.add_argument(
        "--budget", type=int, default=4096, help="tokens a micro-batch under a budget (4096)"
    )
    parser.add_argument("--json-only", action="store_true", help="print the JSON line only")


def run(options: argparse.Namespace) -> None:
    """Check the gradients, measure time in turn and memory apart, print the card and JSON."""
    pin_threads(options.threads)
    work = Workload(
        sequences=options.sequences,
        rows=options.rows,
        budget=options.budget,
        threads=options.threads,
    )
    gap = gradient_gap(Workload(sequences=8, rows=4, budget=256, threads=1, scale=0.1))
    assert gap < 1e-10, f"padding changes the gradient by {gap:.1e}: the figures would be void"
    seconds = _measure_time(work, options.repeats)
    memory = {layout: _peak_memory_apart(work, layout) for layout in LAYOUTS}
    _print(work, seconds, memory, gap, json_only=options.json_only)


def layout_batch(work: Workload, layout: str) -> TrainBatch:
    """Cut and lay out the workload in one of LAYOUTS."""
    texts = work.texts()
    lengths = [len(text) for text in texts]
    arrival = range(len(texts))
    cuts: Sequence[Sequence[int]]
    match layout:
        case "packed" | "padded":
            cuts = [arrival[i : i + work.rows] for i in range(0, len(texts), work.rows)]
        case "packed_budget":
            cuts = plan(lengths, work.budget)
        case "padded_budget":
            cuts = _fill_rows(arrival, lengths, work.budget)
        case "padded_sorted":
            by_length = sorted(arrival, key=lambda i: lengths[i])
            cuts = _fill_rows(by_length, lengths, work.budget)
        case _:
            raise ValueError(f"layout {layout!r}: it must be one of {', '.join(LAYOUTS)}")
    padded = layout.startswith("padded")
    return TrainBatch(
        micro_batches=tuple(_micro_batch(texts, members, padded=padded) for members in cuts),
        sampling=SamplingParams(max_tokens=2048),
        num_sequences=len(texts),
        num_generated=sum(lengths) - PROMPT_LEN * len(texts),
    )


def gradient_gap(work: Workload) -> float:
    """Largest difference between layouts of a float64 update, relative to the largest update.

    With eps = 1 AdamW's first update is g / (|g| + 1): as smooth as the gradient itself.
    """
    start = _flat(_learner(benchmark_model(hidden=32, layers=2).double()))
    updates = []
    for layout in LAYOUTS:
        learner = _learner(
            benchmark_model(hidden=32, layers=2).double(), learning_rate=1.0, eps=1.0
        )
        learner.step([layout_batch(work, layout)])
        updates.append(_flat(learner) - start)
    largest = updates[0].abs().max().item()
    return max((updates[0] - other).abs().max().item() for other in updates[1:]) / largest


def _flat(learner: Learner) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in learner.weights().tensors.values()])


def _fill_rows(order: Sequence[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Take sequences in order while rows x longest stays within the budget."""
    cuts: list[list[int]] = []
    for index in order:
        together = [*cuts[-1], index] if cuts else [index]
        if cuts and len(together) * max(lengths[i] for i in together) <= budget:
            cuts[-1] = together
        else:
            cuts.append([index])
    return cuts


def _micro_batch(
    texts: Sequence[tuple[int, ...]], members: Sequence[int], *, padded: bool
) -> MicroBatch:
    """Lay out the members; `padded` fills each up to the longest with token 0, without a loss."""
    chosen = [texts[i] for i in members]
    width = max(len(text) for text in chosen) if padded else 0
    packed = lay_out(
        [text + (0,) * (width - len(text)) for text in chosen], [PROMPT_LEN] * len(chosen)
    )
    real = packed.positions < torch.tensor([len(text) for text in chosen])[packed.sequence]
    mask = packed.loss_mask * real
    better = torch.tensor([1.0 if i % 2 else -1.0 for i in members])
    return MicroBatch(
        packed=PackedSequences(
            tokens=packed.tokens,
            positions=packed.positions,
            sequence=packed.sequence,
            cu_seqlens=packed.cu_seqlens,
            loss_mask=mask,
        ),
        rollout_logprobs=-6.0 * mask,
        advantages=better[packed.sequence] * mask,
    )


def benchmark_model(hidden: int = 128, layers: int = 8) -> Transformer:
    """Return a random model of the size that is measured."""
    model = Transformer(
        ModelConfig(
            family="qwen3",
            vocab_size=VOCAB_SIZE,
            hidden_size=hidden,
            intermediate_size=3 * hidden,
            num_layers=layers,
            num_heads=4,
            num_kv_heads=2,
            head_dim=32,
            max_positions=2048,
            qk_norm=True,
        )
    )
    model.initialize(torch.Generator().manual_seed(1))
    return model


def _learner(model: Transformer, *, learning_rate: float = 1e-6, eps: float = 1e-8) -> Learner:
    optimizer = OptimizerSettings(learning_rate=learning_rate, eps=eps)
    return Learner(model, LearnerSettings(loss="dapo", optimizer=optimizer))


def _measure_time(work: Workload, repeats: int) -> dict[str, list[float]]:
    learner = _learner(benchmark_model())
    batches = {layout: layout_batch(work, layout) for layout in LAYOUTS}

    def step(layout: str) -> None:
        learner.step([batches[layout]])

    return paired({layout: partial(step, layout) for layout in LAYOUTS}, repeats=repeats)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Resident memory of a process that learns: before its first step, and at its peak."""

    idle_bytes: int
    peak_bytes: int

    @property
    def step_bytes(self) -> int:
        """What the step itself needed: activations, gradients, optimizer state."""
        return self.peak_bytes - self.idle_bytes


def _peak_memory_apart(work: Workload, layout: str) -> Memory:
    """Measure in a fresh process: a high-water mark never falls."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
        return pool.submit(_peak_memory, work, layout).result()


def _peak_memory(work: Workload, layout: str) -> Memory:
    pin_threads(work.threads)
    learner, batch = _learner(benchmark_model()), layout_batch(work, layout)
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


def _print(
    work: Workload,
    seconds: dict[str, list[float]],
    memory: dict[str, Memory],
    gap: float,
    *,
    json_only: bool,
) -> None:
    """Print one row a layout, then the ratios as JSON."""
    texts = work.texts()
    lengths = sorted(len(text) - PROMPT_LEN for text in texts)
    useful = sum(len(text) for text in texts)
    speed = {name: Spread.of([useful / s for s in times]) for name, times in seconds.items()}
    rows = []
    for layout in LAYOUTS:
        batch = layout_batch(work, layout)
        computed = sum(one.packed.num_tokens for one in batch.micro_batches)
        rows.append(
            [
                layout,
                str(len(batch.micro_batches)),
                f"{1 - useful / computed:.0%}",
                speed[layout].text(0),
                f"{memory[layout].step_bytes / 2**20:,.0f}",
            ]
        )
    packed_ratio = ratios(seconds["padded"], seconds["packed"])
    same_budget = ratios(seconds["padded_budget"], seconds["packed_budget"])
    sorted_ratio = ratios(seconds["padded_sorted"], seconds["packed_budget"])
    result = {
        "packed_ratio": packed_ratio.median,
        "peak_memory_ratio": memory["padded"].step_bytes / memory["packed"].step_bytes,
        "packed_ratio_spread": packed_ratio.numbers(),
        "packed_ratio_same_budget": same_budget.numbers(),
        "packed_ratio_sorted": sorted_ratio.numbers(),
        "tokens_per_second": {name: spread.median for name, spread in speed.items()},
        "step_bytes": {name: one.step_bytes for name, one in memory.items()},
        "idle_bytes": memory["packed"].idle_bytes,
        "lengths": {"median": lengths[len(lengths) // 2], "max": lengths[-1], "sum": sum(lengths)},
        "gradient_gap": gap,
    }
    title = (
        f"learner: {work.sequences} sequences, median {lengths[len(lengths) // 2]}, longest "
        f"{lengths[-1]}; packed / padded {packed_ratio.text()}x"
    )
    columns = ("layout", "micro-batches", "padding", "tokens/s", "step MiB")
    finish(title, columns, rows, result, json_only=json_only)


def main() -> None:
    """Run as `python -m longtail.bench.training.learner`."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    run(parser.parse_args())


if __name__ == "__main__":
    main()
