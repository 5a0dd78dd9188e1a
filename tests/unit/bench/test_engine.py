"""`longtail bench engine`: its lower bound, its comparisons and its card."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from longtail.bench.common.floor import Floor, attention_ways
from longtail.bench.common.peers import Peer, PeerKind, PeerSpec
from longtail.bench.common.process import pin
from longtail.bench.common.timing import Spread
from longtail.bench.engine.card import as_json, lines, table
from longtail.bench.engine.measure import (
    MODELS,
    Cell,
    CellResult,
    engine_turn,
    make_engine,
    make_model,
    make_prompts,
)
from longtail.bench.engine.options import MODEL_NAMES, EngineBenchOptions
from longtail.errors import ConfigError
from longtail.model.hf.model import save_model
from longtail.model.transformer import ModelConfig, Transformer

TINY = ModelConfig(
    family="qwen3",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_positions=64,
    qk_norm=True,
    tied_embeddings=True,
)
OPTIONS = EngineBenchOptions(
    models=("small",), batches=(3,), dtype="float32", new_tokens=5, repeats=1
)


def spec(kind: PeerKind, model_dir: Path) -> PeerSpec:
    return PeerSpec(
        kind=kind, model_dir=str(model_dir), dtype="float32", threads=1, max_len=21, max_batch=3
    )


def cell(model: str, batch: int, **changes: object) -> CellResult:
    one = Spread(median=1.0, low=1.0, high=1.0)
    plain = CellResult(
        model=model,
        batch=batch,
        tokens_per_s={"engine": one},
        peer_ratios={},
        floor_ratio=one,
        linear_floor_ratio=one,
        step_ms=one,
        floor_ms=one,
        linear_floor_ms=one,
        floor_attention="sdpa",
        bookkeeping_share=Spread(median=0.05, low=0.04, high=0.06),
        sampler_share=one,
        lowest_cpu_share=1.0,
        cpu_ratios={"floor": one},
    )
    return replace(plain, **changes)


def test_the_models_have_the_documented_shapes() -> None:
    sizes = {}
    for name, config in MODELS.items():
        with torch.device("meta"):
            sizes[name] = sum(p.numel() for p in Transformer(config).parameters())
    assert tuple(MODELS) == MODEL_NAMES
    small = MODELS["small"]
    assert (small.family, small.num_layers, small.hidden_size) == ("qwen3", 8, 256)
    assert small.vocab_size == 4096
    assert 95e6 < sizes["100m"] < 110e6


def test_every_implementation_of_attention_is_softmax_attention_over_the_whole_row() -> None:
    rows_, context = 3, 37
    draw = torch.Generator().manual_seed(1)
    queries = torch.randn(rows_, 4, 16, generator=draw)
    keys, values = torch.randn(2, rows_, context, 2, 16, generator=draw)
    expected = torch.empty(rows_, 4, 16, dtype=torch.float64)
    for row in range(rows_):
        for head in range(4):
            k, v = keys[row, :, head // 2].double(), values[row, :, head // 2].double()
            weights = (k @ queries[row, head].double() / 4.0).softmax(0)
            expected[row, head] = weights @ v
    ways = attention_ways(TINY, torch.float32, rows=rows_, context=context)
    for name, attend in ways.items():
        # a handful of float32 roundings of values below 3
        torch.testing.assert_close(
            attend(queries, keys, values).double(), expected, rtol=0, atol=2e-6, msg=name
        )


def test_a_step_of_the_floor_multiplies_by_every_weight_matrix_once() -> None:
    model = make_model(TINY, torch.float64)  # torch counts only its own products
    floor = Floor(model, rows=3, context=8)
    with FlopCounterMode(display=False) as counter:
        floor.measure(2)
    matrices = sum(p.numel() for p in model.parameters() if p.dim() == 2)  # head = embedding
    counted = counter.get_flop_counts()["Global"]
    products = sum(n for op, n in counted.items() if "mm" in str(op) and "bmm" not in str(op))
    assert products == 2 * (2 * 3 * matrices)  # two steps; a product and a sum, three rows


def test_the_floor_attends_in_the_engines_dtype() -> None:
    model = make_model(TINY, torch.bfloat16)
    model.pack()
    timed = Floor(model, rows=2, context=8).measure(2)
    assert 0 < timed.linear_s < timed.step_s
    assert timed.attention in attention_ways(TINY, torch.bfloat16, rows=2, context=8)


def test_an_engine_turn_accounts_for_all_of_its_time() -> None:
    engine = make_engine(make_model(TINY, torch.float32), max_batch=3, new_tokens=6)
    turn = engine_turn(engine, make_prompts(3, TINY.vocab_size), 6)
    assert engine.num_unfinished == 0
    assert turn.bookkeeping_share > 0
    assert turn.sampler_share > 0
    assert turn.bookkeeping_share + turn.sampler_share < 1
    assert 0 < 5 * turn.decode_step_s < turn.seconds  # 6 tokens: 1 step of prompts, 5 decode steps


def test_prompts_are_distinct_and_in_the_vocabulary() -> None:
    made = make_prompts(32, 4096)
    assert len({tuple(each) for each in made}) == 32
    assert {len(each) for each in made} == {16}
    assert all(0 <= token < 4096 for each in made for token in each)


@pytest.mark.slow
def test_a_cell_compares_the_engine_with_generate_and_with_the_floor(tmp_path) -> None:
    model = make_model(TINY, torch.float32)
    save_model(model, tmp_path)
    engine = make_engine(model, max_batch=3, new_tokens=5)
    with Peer(sys.executable, spec("generate", tmp_path)) as peer:
        assert peer.description.startswith("transformers ")
        cell = Cell(
            model,
            engine,
            {"generate": peer},
            prompts=make_prompts(3, TINY.vocab_size),
            new_tokens=5,
        )
        measured = cell.measure("tiny", 1)
    speed = measured.tokens_per_s
    assert set(speed) == {"engine", "generate"}
    # with one turn, the ratio within turns is the ratio of the speeds
    ratio = speed["engine"].median / speed["generate"].median
    assert measured.peer_ratios["generate"].median == pytest.approx(ratio)
    floor_ratio = measured.step_ms.median / measured.floor_ms.median
    assert measured.floor_ratio.median == pytest.approx(floor_ratio)
    assert measured.linear_floor_ms.median < measured.floor_ms.median
    assert set(measured.cpu_ratios) == {"generate", "floor"}


def test_a_peer_that_cannot_load_is_reported_with_its_last_output(tmp_path) -> None:
    # vLLM is not installed beside longtail
    with pytest.raises(ConfigError, match=r"(?s)vllm process .* ended with exit code 1; .*Error"):
        Peer(sys.executable, spec("vllm", tmp_path / "absent"))


def test_a_missing_interpreter_is_refused_by_option() -> None:
    with pytest.raises(ConfigError, match="--vllm-python = '/nowhere/python'"):
        Peer("/nowhere/python", spec("vllm", Path()))


def test_json_holds_null_where_a_peer_was_not_measured() -> None:
    twice = Spread(median=2.0, low=1.9, high=2.1)
    measured = [
        cell("small", 1, peer_ratios={"generate": twice}),
        cell("small", 32, peer_ratios={"generate": twice, "vllm": twice}),
    ]
    result = as_json(OPTIONS, [1], measured, {})
    assert result["generate_ratio"] == {"small": {"1": 2.0, "32": 2.0}}
    assert result["vllm_cpu_ratio"] == {"small": {"1": None, "32": 2.0}}
    assert result["floor_ratio"] is None
    json.dumps(result)


def test_the_headline_floor_is_the_100m_model_at_batch_32() -> None:
    measured = [
        cell("small", 32, floor_ratio=Spread(median=1.8, low=1.7, high=1.9)),
        cell("100m", 8, floor_ratio=Spread(median=1.4, low=1.3, high=1.5)),
        cell("100m", 32, floor_ratio=Spread(median=1.2, low=1.1, high=1.3)),
    ]
    result = as_json(OPTIONS, [], measured, {})
    assert result["floor_ratio"] == 1.2
    assert [each["floor_ratio"]["median"] for each in result["cells"]] == [1.8, 1.4, 1.2]


def test_the_headline_bookkeeping_is_the_highest_at_batch_32() -> None:
    shares = {("small", 1): 0.3, ("small", 32): 0.08, ("100m", 32): 0.02}
    measured = [
        cell(*place, bookkeeping_share=Spread(median=share, low=share, high=share))
        for place, share in shares.items()
    ]
    assert as_json(OPTIONS, [], measured, {})["bookkeeping_share"] == 0.08
    assert as_json(OPTIONS, [], measured[:1], {})["bookkeeping_share"] is None


def test_the_card_notes_a_shared_cpu() -> None:
    quiet = list(lines(cell("small", 8)))
    shared = list(lines(cell("small", 8, lowest_cpu_share=0.71)))
    assert table(OPTIONS, [], [cell("small", 8)]).cells() == [list(line) for line in quiet]
    assert not any("CPU shared" in line[-1] for line in quiet)
    assert shared[len(quiet)][-1] == "CPU shared: 71% in a turn"
    assert shared[-1][-1] == "1.00x the time (floor)"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux pins")
def test_pinning_takes_the_last_cpus_and_returns_them() -> None:
    allowed = os.sched_getaffinity(0)
    try:
        assert pin(1) == [max(allowed)]
        assert os.sched_getaffinity(0) == {max(allowed)}
    finally:
        os.sched_setaffinity(0, allowed)
