"""The workload of `longtail bench learner` and `drafter`: heavy-tailed lengths in five layouts.

Lengths are quantiles of a lognormal, the longest 13 times the median, in random order:

    packed, padded                 a fixed number of sequences a micro-batch, in order of arrival,
                                   end to end or padded to the longest of them
    packed, padded under a budget  as many sequences a micro-batch as its tokens, padding included,
                                   allow; in order of arrival when padded
    padded, sorted                 as before, sorted by length first: the best that padding can do

Padding is efficient: one batched attention call a micro-batch, padding last and masked by
causality, the LM head on real tokens only. Only real tokens count as tokens/s. All layouts are
checked to make the same gradient, in float64, before anything is measured.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from longtail.bench.common.card import Table, print_card
from longtail.bench.common.timing import Spread, ratios
from longtail.bench.training.options import LayoutBenchOptions
from longtail.model.transformer import ModelConfig, Transformer
from longtail.rl.packing import lay_out, plan
from longtail.types import MicroBatch, PackedSequences, SamplingParams, TrainBatch

PROMPT_LEN = 16
SIGMA = 1.2
VOCAB_SIZE = 512
LAYOUTS = ("packed", "padded", "packed_budget", "padded_budget", "padded_sorted")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Sequences, and how they are cut into micro-batches.

    Example: Workload(sequences=32, rows=8, budget=4096, threads=1)
    """

    sequences: int
    rows: int
    """Sequences of a micro-batch, for `packed` and `padded`."""
    budget: int
    """Tokens of a micro-batch, for the layouts under a budget."""
    threads: int
    median: float = 110.0
    """Median length in tokens."""

    @staticmethod
    def of(options: LayoutBenchOptions) -> "Workload":
        """Return the workload of the options."""
        return Workload(
            sequences=options.sequences,
            rows=options.rows,
            budget=options.budget,
            threads=options.threads,
        )

    def texts(self) -> list[tuple[int, ...]]:
        """Return random sequences of heavy-tailed lengths, the same every time."""
        generator = torch.Generator().manual_seed(0)
        quantiles = [(i + 0.5) / self.sequences for i in range(self.sequences)]
        normal = NormalDist(sigma=SIGMA)
        factors = torch.tensor([normal.inv_cdf(q) for q in quantiles]).exp() * self.median
        lengths = factors.round().clamp(min=1).int().tolist()
        order = torch.randperm(self.sequences, generator=generator).tolist()
        return [
            tuple(
                torch.randint(VOCAB_SIZE, (PROMPT_LEN + lengths[i],), generator=generator).tolist()
            )
            for i in order
        ]

    def batch(self, layout: str) -> TrainBatch:
        """Cut the sequences and lay them out in one of LAYOUTS."""
        texts = self.texts()
        lengths = [len(text) for text in texts]
        arrival = range(len(texts))
        cuts: Sequence[Sequence[int]]
        match layout:
            case "packed" | "padded":
                cuts = [arrival[i : i + self.rows] for i in range(0, len(texts), self.rows)]
            case "packed_budget":
                cuts = plan(lengths, self.budget)
            case "padded_budget":
                cuts = fill_rows(arrival, lengths, self.budget)
            case "padded_sorted":
                by_length = sorted(arrival, key=lambda i: lengths[i])
                cuts = fill_rows(by_length, lengths, self.budget)
            case _:
                raise ValueError(f"layout {layout!r}: it must be one of {', '.join(LAYOUTS)}")
        padded = layout.startswith("padded")
        return TrainBatch(
            micro_batches=tuple(_micro_batch(texts, members, padded=padded) for members in cuts),
            sampling=SamplingParams(max_tokens=2048),
            num_sequences=len(texts),
            num_generated=sum(lengths) - PROMPT_LEN * len(texts),
        )


SMALL = Workload(sequences=8, rows=4, budget=256, threads=1, median=11.0)
"""Workload of the gradient check."""


def fill_rows(order: Sequence[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
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
    signs = torch.tensor([1.0 if i % 2 else -1.0 for i in members])
    return MicroBatch(
        packed=PackedSequences(
            tokens=packed.tokens,
            positions=packed.positions,
            sequence=packed.sequence,
            cu_seqlens=packed.cu_seqlens,
            loss_mask=mask,
        ),
        rollout_logprobs=-6.0 * mask,
        advantages=signs[packed.sequence] * mask,
    )


def benchmark_model(hidden: int = 128, layers: int = 8) -> Transformer:
    """Return a random model of the measured size."""
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


def largest_gap(update: Callable[[str], Tensor]) -> float:
    """Return the largest difference of the layouts' updates, relative to the largest update."""
    first, *others = [update(layout) for layout in LAYOUTS]
    return max((first - other).abs().max().item() for other in others) / first.abs().max().item()


def check_gap(gap: float, tolerance: float) -> None:
    """Raise unless all layouts make the same gradient."""
    assert gap < tolerance, f"padding changes the gradient by {gap:.1e}: the figures would be void"


def print_layouts(
    work: Workload,
    options: LayoutBenchOptions,
    *,
    title: str,
    seconds: Mapping[str, Sequence[float]],
    columns: Mapping[str, Callable[[str], object]],
    figures: Mapping[str, Any],
) -> None:
    """Print a line for each layout; the ratios and `figures` are the JSON."""
    texts, batches = work.texts(), {layout: work.batch(layout) for layout in LAYOUTS}
    lengths = sorted(len(text) - PROMPT_LEN for text in texts)
    real = sum(map(len, texts))
    median, longest = lengths[len(lengths) // 2], lengths[-1]
    packed_ratio = ratios(seconds["padded"], seconds["packed"])

    def padding(layout: str) -> str:
        computed = sum(each.packed.num_tokens for each in batches[layout].micro_batches)
        return f"{1 - real / computed:.0%}"

    table = Table(
        f"{title}: {work.sequences} sequences, median {median}, longest {longest}; packed / padded "
        f"{packed_ratio.text()}x",
        {
            "layout": lambda layout: layout.replace("_", ", "),
            "micro-batches": lambda layout: len(batches[layout].micro_batches),
            "padding": padding,
            "tokens/s": lambda layout: Spread.of([real / s for s in seconds[layout]]).text(0),
            **columns,
        },
        LAYOUTS,
    )
    result = {
        "packed_ratio": packed_ratio.median,
        "packed_ratio_spread": packed_ratio.numbers(),
        "packed_ratio_same_budget": ratios(
            seconds["padded_budget"], seconds["packed_budget"]
        ).numbers(),
        "packed_ratio_sorted": ratios(seconds["padded_sorted"], seconds["packed_budget"]).numbers(),
        "lengths": {"median": median, "max": longest, "sum": sum(lengths)},
        **figures,
    }
    print_card([table], result, json_only=options.json_only)
