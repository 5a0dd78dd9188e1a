"""Steps of `longtail bench gpu`: decode, verify and draft in one shape, and memory of graphs.

Steps are the engine's own, host and sampler included, on synthetic requests with contexts of 512
tokens. The bound of a decode step is memory: all weights but the embedding, and the context of
every request, read once at the bandwidth of a copy.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from longtail.bench.gpu.kernels import DeviceClock
from longtail.drafter.eagle.drafter import EagleDrafter
from longtail.drafter.eagle.layer import EagleConfig, EagleLayer
from longtail.engine.engine import RolloutEngine
from longtail.engine.kv.choice import kv_bytes
from longtail.engine.profile import SyntheticSteps, extend_texts, synthetic_request
from longtail.engine.request import EngineLimits
from longtail.engine.speculation.speculator import Speculation
from longtail.engine.step.sampler import make_sampler
from longtail.model.graphs import CudaGraphs, GraphPool, graph_size
from longtail.model.transformer import ModelConfig, Transformer
from longtail.sampling import noise_key
from longtail.speculation.strategy import Strategy
from longtail.speculation.tree import MAX_NODES
from longtail.types import Request, SamplingParams

DEPTH = 8
_MAX_STEP = 512
_VERIFIED = 63
"""Tokens of a root and the largest draft, in the graph of 64 tokens."""


def random_model(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Transformer:
    """Make a model with random weights directly on its device and in its dtype."""
    with torch.device("meta"):
        model = Transformer(config)
    model = model.to(dtype).to_empty(device=device)
    model.initialize(torch.Generator(device).manual_seed(0))
    return model.eval()


def read_bytes(model: Transformer) -> int:
    """Return the bytes of weights that a step of few tokens reads: all but an untied embedding."""
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    embedding = model.embedding.weight
    untied = embedding is not model.head.weight
    return weights - untied * embedding.numel() * embedding.element_size()


def decode_steps(
    model: Transformer, clock: DeviceClock, bandwidth: float, batches: Sequence[int]
) -> list[dict[str, Any]]:
    """Time plain decoding against the bound."""
    cells = []
    for batch in batches:
        steps = SyntheticSteps(model, batch, max(_MAX_STEP, batch))
        step_s = clock.seconds(partial(steps.step, batch, steps.long))
        context = batch * steps.long * kv_bytes(model.config, model.dtype)
        bound_s = (read_bytes(model) + context) / bandwidth
        cells.append(
            {
                "batch": batch,
                "context": steps.long,
                "step_ms": step_s * 1e3,
                "bound_ms": bound_s * 1e3,
                "step_over_bound": step_s / bound_s,
            }
        )
    return cells


def invariant_steps(
    model: Transformer, clock: DeviceClock, cells: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Time the same steps with batch-invariant products."""
    model.batch_invariant = True
    model.pack()
    found = []
    for cell in cells:
        steps = SyntheticSteps(model, cell["batch"], max(_MAX_STEP, cell["batch"]))
        step_ms = clock.seconds(partial(steps.step, cell["batch"], steps.long)) * 1e3
        over = step_ms / cell["step_ms"]
        found.append({"batch": cell["batch"], "step_ms": step_ms, "over_plain": over})
    model.batch_invariant = False
    model.pack()
    return found


def verify_step(model: Transformer, clock: DeviceClock) -> dict[str, Any]:
    """Time a step that verifies the largest draft of one request against one that decodes."""
    steps = SyntheticSteps(model, 1, _MAX_STEP)
    one_s = clock.seconds(lambda: steps.step(1, steps.long))
    many_s = clock.seconds(lambda: steps.step(_VERIFIED, steps.long))
    return {"tokens": _VERIFIED, "verify_ms": many_s * 1e3, "verify_over_decode": many_s / one_s}


def draft_pass(model: Transformer, clock: DeviceClock, step_ms: float) -> dict[str, Any]:
    """Time an EAGLE-1 chain of the largest depth for one request against a decode step."""
    layer = EagleLayer(EagleConfig(recipe="eagle1", target=model.config))
    layer.initialize(torch.Generator().manual_seed(0))
    drafter = EagleDrafter(layer.to(model.device, model.dtype), model)
    noise, active = make_sampler(model).noise, synthetic_request("draft", 0)
    extend_texts(drafter, model, [active], 32)
    shape = Strategy(depth=DEPTH)

    def draft() -> None:
        extend_texts(drafter, model, [active], 4)
        requests = [active.draftable(MAX_NODES)]
        drafter.propose(requests, shape, noise.for_drafts([active], shape.depth))

    seconds = clock.seconds(draft)
    return {
        "depth": DEPTH,
        "draft_ms": seconds * 1e3,
        "draft_over_decode": seconds * 1e3 / step_ms,
    }


def graph_memory(model: Transformer) -> dict[str, Any] | None:
    """Measure the memory of graphs: one strategy's steps at 32 requests, then all sizes."""
    if model.graphs is None:
        return None
    model.graphs = GraphPool(CudaGraphs(model.device))
    steps = SyntheticSteps(model, 32, _MAX_STEP)
    for count in (32, 32 * 5):
        steps.step(count, steps.short)
    single, single_graphs = model.graphs.num_bytes, model.graphs.num_graphs
    for size in sorted({graph_size(count) for count in range(1, _MAX_STEP + 1)}, reverse=True):
        steps.step(size, steps.short)
    return {
        "single_strategy_mb": single / 2**20,
        "single_strategy_graphs": single_graphs,
        "all_mb": model.graphs.num_bytes / 2**20,
        "all_graphs": model.graphs.num_graphs,
        "all_over_single": model.graphs.num_bytes / max(single, 1),
    }


def changes_no_bit(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether batch-invariant drafting leaves every bit of tokens and logprobs unchanged."""
    model = random_model(config, dtype, device)
    model.batch_invariant = True
    layer = EagleLayer(EagleConfig(recipe="eagle1", target=config))
    layer.initialize(torch.Generator().manual_seed(0))
    drafter = EagleDrafter(layer.to(device, dtype), model)
    requests = [
        Request(
            request_id=str(index),
            prompt_tokens=(1, 2, 3 + index),
            noise_key=noise_key(0, "bench", index),
            sampling=SamplingParams(max_tokens=24),
        )
        for index in range(12)
    ]
    limits = EngineLimits(max_running=8, max_step_tokens=512, max_len=64)
    engine = RolloutEngine(model, lambda tokens: "", limits)
    plain = engine.generate(requests)
    shape = Strategy(depth=3, width=2, size=5, beam=2)
    engine.speculate(Speculation.fixed(drafter, shape))
    drafted = engine.generate(requests)
    return all(
        (one.tokens, one.logprobs) == (other.tokens, other.logprobs)
        for one, other in zip(plain, drafted, strict=True)
    )
