"""Cells of `longtail bench engine`: a cell is one model at one batch size.

In a cell every contestant writes the same number of tokens after the same prompts, in turns
(engine, generate, vllm, floor, engine, ...), each on the same pinned thread.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import final

import torch

from longtail.bench.common.floor import Floor, FloorTime
from longtail.bench.common.own import open_own
from longtail.bench.common.peers import Peer, PeerKind, PeerSpec, Turn
from longtail.bench.common.process import Log
from longtail.bench.common.timing import Spread, paired, ratios
from longtail.bench.engine.options import MAX_NEW_TOKENS, EngineBenchOptions
from longtail.engine.engine import RolloutEngine
from longtail.engine.limits import EngineLimits
from longtail.engine.report import RolloutMeter, StepReport
from longtail.model.hf.model import save_model
from longtail.model.transformer import ModelConfig, Transformer
from longtail.sampling import noise_key
from longtail.system.device import DTYPES
from longtail.types import Request, SamplingParams

PROMPT_LEN = 16
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
    """Figures of one cell; spreads are over the turns."""

    model: str
    batch: int
    tokens_per_s: Mapping[str, Spread]
    """Generated tokens per second by contestant, prefill of the prompts included."""
    peer_ratios: Mapping[str, Spread]
    """Speed of this engine over that of the peer, within each turn."""
    floor_ratio: Spread
    """Seconds of this engine's decode step over those of the matrix products alone."""
    linear_floor_ratio: Spread
    """The same over the products with weights alone."""
    step_ms: Spread
    floor_ms: Spread
    linear_floor_ms: Spread
    floor_attention: str
    bookkeeping_share: Spread
    """Share of the engine's time outside forward passes and sampler."""
    sampler_share: Spread
    lowest_cpu_share: float
    """CPU seconds over seconds of the most disturbed turn."""
    cpu_ratios: Mapping[str, Spread]
    """Ratios to the peers and the floor by CPU seconds: valid even in a disturbed turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTurn:
    """One batch written by this engine."""

    seconds: float
    cpu_seconds: float
    decode_step_s: float
    """Mean over the steps after the first, which computes the prompts."""
    decode_step_cpu_s: float
    bookkeeping_share: float
    sampler_share: float


def make_prompts(batch: int, vocab_size: int) -> list[list[int]]:
    """Make distinct prompts of PROMPT_LEN tokens."""
    return [[(7 * i + 13 * j) % vocab_size for j in range(PROMPT_LEN)] for i in range(batch)]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSubject:
    """A model, and as many prompts of one length as the largest batch has."""

    model: Transformer
    prompts: Sequence[Sequence[int]]

    @property
    def prompt_len(self) -> int:
        """Tokens of each prompt."""
        return len(self.prompts[0])


def make_subject(name: str, options: EngineBenchOptions, log: Log) -> EngineSubject:
    """Return a model of MODELS, or the user's own with its prompts cut to the shortest."""
    most = max(options.batches)
    if options.model is None or options.prompts is None:
        model = make_model(MODELS[name], DTYPES[options.dtype])
        return EngineSubject(model=model, prompts=make_prompts(most, model.config.vocab_size))
    own = open_own(name, options.prompts, options.dtype, most, log)
    shortest = min(map(len, own.prompts))
    cut = [prompt[:shortest] for prompt in own.prompts]
    return EngineSubject(
        model=own.target.model, prompts=[cut[index % len(cut)] for index in range(most)]
    )


def make_model(config: ModelConfig, dtype: torch.dtype) -> Transformer:
    """Draw random weights: speed does not depend on them."""
    model = Transformer(config)
    model.initialize(torch.Generator().manual_seed(0))
    return model.to(dtype)


def make_engine(
    model: Transformer, *, max_batch: int, new_tokens: int, prompt_len: int = PROMPT_LEN
) -> RolloutEngine:
    """Build an engine that runs `max_batch` requests at a time; text is not decoded."""
    limits = EngineLimits(
        max_running=max_batch,
        max_step_tokens=max(512, max_batch * prompt_len),
        max_len=prompt_len + new_tokens,
    )
    return RolloutEngine(model, lambda tokens: "", limits)


def engine_turn(
    engine: RolloutEngine, prompts: Sequence[Sequence[int]], new_tokens: int
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
        for i, tokens in enumerate(prompts)
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


def measure_model(
    name: str, options: EngineBenchOptions, log: Log, contestants: dict[str, str]
) -> list[CellResult]:
    """Measure one model at every batch size, and add the peers' descriptions to `contestants`."""
    subject = make_subject(name, options, log)
    model, prompt_len = subject.model, subject.prompt_len
    pythons: dict[PeerKind, str] = {"generate": sys.executable} if options.generate else {}
    if options.vllm_python is not None:
        pythons["vllm"] = options.vllm_python
    peers: dict[PeerKind, Peer] = {}
    cells: list[CellResult] = []
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="longtail-bench-"))
        save_model(model, folder)  # peers load the same weights
        for kind, python in pythons.items():
            log(f"{name}: starting {kind}")
            spec = PeerSpec(
                kind=kind,
                model_dir=folder,
                dtype=options.dtype,
                threads=options.threads,
                max_len=prompt_len + options.new_tokens,
                max_batch=max(options.batches),
            )
            peers[kind] = stack.enter_context(Peer(python, spec))
            contestants[kind] = peers[kind].description
        engine = make_engine(
            model,
            max_batch=max(options.batches),
            new_tokens=options.new_tokens,
            prompt_len=prompt_len,
        )
        for batch in options.batches:
            log(f"{name}: batch {batch}")
            prompts = subject.prompts[:batch]
            cell = Cell(model, engine, peers, prompts=prompts, new_tokens=options.new_tokens)
            cells.append(cell.measure(name, options.repeats))
    return cells


@final
class Cell:
    """The contestants of one model at one batch size, warmed up."""

    def __init__(
        self,
        model: Transformer,
        engine: RolloutEngine,
        peers: Mapping[PeerKind, Peer],
        *,
        prompts: Sequence[Sequence[int]],
        new_tokens: int,
    ) -> None:
        self._engine, self._peers, self._new_tokens = engine, peers, new_tokens
        self._prompts = prompts
        # The steps after the first see prompt_len + 1 to prompt_len + new_tokens - 1 tokens.
        self._floor = Floor(model, rows=len(prompts), context=len(prompts[0]) + new_tokens // 2)
        warm_tokens = min(new_tokens, 8)
        engine_turn(engine, self._prompts, warm_tokens)
        for peer in peers.values():
            peer.generate(self._prompts, warm_tokens)
        floor_s = self._floor.measure(3).step_s
        self._floor_steps = max(1, min(new_tokens, round(_FLOOR_SECONDS / floor_s)))
        self._engine_turns: list[EngineTurn] = []
        self._peer_turns: dict[PeerKind, list[Turn]] = {kind: [] for kind in peers}
        self._floor_times: list[FloorTime] = []

    def measure(self, name: str, repeats: int) -> CellResult:
        """Run the contestants in turns and compare them within each turn."""
        contestants: dict[str, Callable[[], float | None]] = {"engine": self._run_engine}
        contestants |= {kind: partial(self._run_peer, kind) for kind in self._peers}
        seconds = paired(contestants | {"floor": self._run_floor}, repeats=repeats, warmup=0)
        del seconds["floor"]
        turns, num_tokens = self._engine_turns, len(self._prompts) * self._new_tokens
        steps = [turn.decode_step_s for turn in turns]
        floors = [each.step_s for each in self._floor_times]
        linears = [each.linear_s for each in self._floor_times]
        # helper threads of a peer may take its share above 1
        timed: list[EngineTurn | Turn] = [*turns, *chain(*self._peer_turns.values())]
        cpu_ratios: dict[str, Spread] = {
            kind: ratios([turn.cpu_seconds for turn in own], [turn.cpu_seconds for turn in turns])
            for kind, own in self._peer_turns.items()
        }
        cpu_ratios["floor"] = ratios(
            [turn.decode_step_cpu_s for turn in turns],
            [each.step_cpu_s for each in self._floor_times],
        )
        return CellResult(
            model=name,
            batch=len(self._prompts),
            tokens_per_s={
                arm: Spread.of([num_tokens / each for each in taken])
                for arm, taken in seconds.items()
            },
            peer_ratios={kind: ratios(seconds[kind], seconds["engine"]) for kind in self._peers},
            floor_ratio=ratios(steps, floors),
            linear_floor_ratio=ratios(steps, linears),
            step_ms=Spread.of(steps).scaled(1e3),
            floor_ms=Spread.of(floors).scaled(1e3),
            linear_floor_ms=Spread.of(linears).scaled(1e3),
            floor_attention=self._floor_times[-1].attention,
            bookkeeping_share=Spread.of([turn.bookkeeping_share for turn in turns]),
            sampler_share=Spread.of([turn.sampler_share for turn in turns]),
            lowest_cpu_share=min(1.0, *(turn.cpu_seconds / turn.seconds for turn in timed)),
            cpu_ratios=cpu_ratios,
        )

    def _run_engine(self) -> float:
        self._engine_turns.append(engine_turn(self._engine, self._prompts, self._new_tokens))
        return self._engine_turns[-1].seconds

    def _run_peer(self, kind: PeerKind) -> float:
        self._peer_turns[kind].append(self._peers[kind].generate(self._prompts, self._new_tokens))
        return self._peer_turns[kind][-1].seconds

    def _run_floor(self) -> float:
        self._floor_times.append(self._floor.measure(self._floor_steps))
        return self._floor_times[-1].step_s
