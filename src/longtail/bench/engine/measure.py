"""Measures cells of `longtail bench engine`: a cell is one model at one batch size.

In a cell every contestant writes the same number of tokens after the same prompts, in turns
(engine, generate, vllm, floor, engine, ...), each on the same pinned thread, so that a slow minute
of the machine falls on all of them.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import final

import torch

from longtail.bench.common.floor import Floor, FloorTime
from longtail.bench.common.peers import Peer, PeerKind, PeerSetting, Turn
from longtail.bench.common.report import Spread, paired, ratios
from longtail.bench.engine.options import MAX_NEW_TOKENS, Setting
from longtail.engine.engine import RolloutEngine
from longtail.engine.limits import EngineLimits
from longtail.engine.report import RolloutMeter, StepReport
from longtail.model.hf.model import save_model
from longtail.model.transformer import ModelConfig, Transformer
from longtail.sampling import noise_key
from longtail.types import Request, SamplingParams

PROMPT_LEN = 16
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_FLOOR_SECONDS = 2.0


def _qwen3(layers: int, hidden: int, heads: int, kv_heads: int, intermediate: int) -> ModelConfig:
    return ModelConfig(
        family="qwen3",
        vocab_size=4096,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=64,
        max_positions=PROMPT_LEN + MAX_NEW_TOKENS,
        qk_norm=True,
        tied_embeddings=True,
    )


MODELS: Mapping[str, ModelConfig] = {
    "small": _qwen3(8, 256, 4, 2, 768),  # 7.3M parameters
    "100m": _qwen3(16, 768, 12, 4, 2048),  # 103.8M parameters
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    """What one cell measured; spreads are over the turns.

    Example: CellResult(model="small", batch=8, tokens_per_s={"engine": ..., "generate": ...},
                        peer_ratios={"generate": ...}, floor_ratio=..., linear_floor_ratio=...,
                        step_ms=..., floor_ms=..., linear_floor_ms=..., floor_attention="sdpa",
                        bookkeeping_share=..., sampler_share=..., lowest_cpu_share=0.99,
                        cpu_ratios={"generate": ..., "floor": ...})
    """

    model: str
    batch: int
    tokens_per_s: Mapping[str, Spread]
    """Generated tokens a second, prompts' prefill included, by contestant."""
    peer_ratios: Mapping[PeerKind, Spread]
    """Speed of the engine over the rival's, within each turn."""
    floor_ratio: Spread
    """Time of the engine's decode step over the floor's, within each turn."""
    linear_floor_ratio: Spread
    """The same over the floor's products with weights alone."""
    step_ms: Spread
    floor_ms: Spread
    linear_floor_ms: Spread
    floor_attention: str
    bookkeeping_share: Spread
    """Share of the engine's time outside forward passes and sampler."""
    sampler_share: Spread
    lowest_cpu_share: float
    """CPU seconds over seconds of the most disturbed turn; well below 1, something interfered."""
    cpu_ratios: Mapping[str, Spread]
    """Ratios to the rivals and the floor by CPU seconds: what holds if something interfered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTurn:
    """One batch written by the engine."""

    seconds: float
    cpu_seconds: float
    decode_step_s: float
    """Mean over the steps after the first, which computes the prompts."""
    decode_step_cpu_s: float
    bookkeeping_share: float
    sampler_share: float


def prompts(batch: int, vocab_size: int) -> list[list[int]]:
    """Make distinct prompts of PROMPT_LEN tokens."""
    return [[(7 * i + 13 * j) % vocab_size for j in range(PROMPT_LEN)] for i in range(batch)]


def make_model(config: ModelConfig, dtype: torch.dtype) -> Transformer:
    """Draw random weights: speed does not depend on them."""
    model = Transformer(config)
    model.initialize(torch.Generator().manual_seed(0))
    return model.to(dtype)


def make_engine(model: Transformer, *, max_batch: int, new_tokens: int) -> RolloutEngine:
    """Build an engine that runs `max_batch` requests at a time; text is not decoded."""
    limits = EngineLimits(
        max_running=max_batch,
        max_step_tokens=max(512, max_batch * PROMPT_LEN),
        max_len=PROMPT_LEN + new_tokens,
    )
    return RolloutEngine(model, lambda tokens: "", limits)


def engine_turn(
    engine: RolloutEngine, asked: Sequence[Sequence[int]], new_tokens: int
) -> EngineTurn:
    """Write `new_tokens` tokens after each prompt, timed from outside and by the step reports."""
    sampling = SamplingParams(temperature=1.0, max_tokens=new_tokens)
    requests = [
        Request(
            request_id=str(i),
            prompt_tokens=tuple(tokens),
            noise_key=noise_key(0, i),
            sampling=sampling,
        )
        for i, tokens in enumerate(asked)
    ]
    meter = RolloutMeter()
    ends: list[tuple[float, float]] = []

    def on_step(step: StepReport) -> None:
        meter.add(step)
        ends.append((time.perf_counter(), time.process_time()))

    start, cpu_start = time.perf_counter(), time.process_time()
    engine.generate(requests, on_step)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    (first, cpu_first), (last, cpu_last) = ends[0], ends[-1]
    report, num_decodes = meter.report(), len(ends) - 1
    return EngineTurn(
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        decode_step_s=(last - first) / num_decodes,
        decode_step_cpu_s=(cpu_last - cpu_first) / num_decodes,
        bookkeeping_share=1 - (report.forward_s + report.sample_s) / seconds,
        sampler_share=report.sample_s / seconds,
    )


@final
@dataclass(slots=True)
class _Turns:
    """What the contestants of a cell said, turn by turn."""

    engine: list[EngineTurn] = field(default_factory=list)
    peers: dict[PeerKind, list[Turn]] = field(default_factory=dict)
    floor: list[FloorTime] = field(default_factory=list)

    def lowest_cpu_share(self) -> float:
        """Of the most disturbed turn; a rival's helper threads may take it above 1."""
        timed: list[EngineTurn | Turn] = [*self.engine, *chain(*self.peers.values())]
        return min(1.0, *(turn.cpu_seconds / turn.seconds for turn in timed))

    def cpu_ratios(self) -> dict[str, Spread]:
        """Ratios like those by the clock, by the CPU time that each turn took."""
        engine = [turn.cpu_seconds for turn in self.engine]
        steps = [turn.decode_step_cpu_s for turn in self.engine]
        found: dict[str, Spread] = {
            kind: ratios([turn.cpu_seconds for turn in taken], engine)
            for kind, taken in self.peers.items()
        }
        return found | {"floor": ratios(steps, [each.step_cpu_s for each in self.floor])}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelResult:
    """All cells of one model, and what its rivals say they are."""

    cells: tuple[CellResult, ...]
    peers: Mapping[str, str]


def measure_model(name: str, setting: Setting, say: Callable[[str], None]) -> ModelResult:
    """Measure one model at every batch size; its rivals start once and end with it."""
    model = make_model(MODELS[name], DTYPES[setting.dtype])
    pythons: dict[PeerKind, str] = {"generate": sys.executable} if setting.generate else {}
    if setting.vllm_python is not None:
        pythons["vllm"] = setting.vllm_python
    peers: dict[PeerKind, Peer] = {}
    cells: list[CellResult] = []
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="longtail-bench-"))
        save_model(model, folder)  # rivals load the very same weights
        for kind, python in pythons.items():
            say(f"{name}: starting {kind}")
            peers[kind] = stack.enter_context(
                Peer(
                    PeerSetting(
                        kind=kind,
                        python=python,
                        model_dir=Path(folder),
                        dtype=setting.dtype,
                        threads=setting.threads,
                        max_len=PROMPT_LEN + setting.new_tokens,
                        max_batch=max(setting.batches),
                    )
                )
            )
        engine = make_engine(model, max_batch=max(setting.batches), new_tokens=setting.new_tokens)
        for batch in setting.batches:
            say(f"{name}: batch {batch}")
            cells.append(measure_cell(name, model, engine, peers, batch=batch, setting=setting))
    descriptions: dict[str, str] = {kind: peer.description for kind, peer in peers.items()}
    return ModelResult(cells=tuple(cells), peers=descriptions)


def measure_cell(
    name: str,
    model: Transformer,
    engine: RolloutEngine,
    peers: Mapping[PeerKind, Peer],
    *,
    batch: int,
    setting: Setting,
) -> CellResult:
    """Let the contestants of one cell run in turns and compare them within each turn."""
    asked, new_tokens = prompts(batch, model.config.vocab_size), setting.new_tokens
    # The steps after the first see PROMPT_LEN + 1 to PROMPT_LEN + new_tokens - 1 tokens.
    floor = Floor(model, rows=batch, context=PROMPT_LEN + new_tokens // 2)
    warm_tokens = min(new_tokens, 8)
    engine_turn(engine, asked, warm_tokens)
    for peer in peers.values():
        peer.generate(asked, warm_tokens)
    floor_steps = max(1, min(new_tokens, round(_FLOOR_SECONDS / floor.measure(3).step_s)))
    turns = _Turns(peers={kind: [] for kind in peers})

    def run_engine() -> float:
        turns.engine.append(engine_turn(engine, asked, new_tokens))
        return turns.engine[-1].seconds

    def run_peer(kind: PeerKind, peer: Peer) -> Callable[[], float]:
        def run() -> float:
            turns.peers[kind].append(peer.generate(asked, new_tokens))
            return turns.peers[kind][-1].seconds

        return run

    def run_floor() -> float:
        turns.floor.append(floor.measure(floor_steps))
        return turns.floor[-1].step_s

    contestants: dict[str, Callable[[], float | None]] = {"engine": run_engine}
    contestants |= {kind: run_peer(kind, peer) for kind, peer in peers.items()}
    seconds = paired(contestants | {"floor": run_floor}, repeats=setting.repeats, warmup=0)
    del seconds["floor"]
    return _summarise(name, batch, new_tokens, seconds, turns)


def _summarise(
    name: str,
    batch: int,
    new_tokens: int,
    seconds: Mapping[str, Sequence[float]],
    turns: _Turns,
) -> CellResult:
    steps = [turn.decode_step_s for turn in turns.engine]
    floors = [each.step_s for each in turns.floor]
    linears = [each.linear_s for each in turns.floor]
    num_tokens = batch * new_tokens
    return CellResult(
        model=name,
        batch=batch,
        tokens_per_s={
            arm: Spread.of([num_tokens / each for each in taken]) for arm, taken in seconds.items()
        },
        peer_ratios={kind: ratios(seconds[kind], seconds["engine"]) for kind in turns.peers},
        floor_ratio=ratios(steps, floors),
        linear_floor_ratio=ratios(steps, linears),
        step_ms=Spread.of(steps).scaled(1e3),
        floor_ms=Spread.of(floors).scaled(1e3),
        linear_floor_ms=Spread.of(linears).scaled(1e3),
        floor_attention=turns.floor[-1].attention,
        bookkeeping_share=Spread.of([turn.bookkeeping_share for turn in turns.engine]),
        sampler_share=Spread.of([turn.sampler_share for turn in turns.engine]),
        lowest_cpu_share=turns.lowest_cpu_share(),
        cpu_ratios=turns.cpu_ratios(),
    )
