"""The native kernels against their definition: `Kernels`, computed in float64.

Both read the same float32 or bfloat16 numbers. Native arithmetic is float32, so a result may be off
by a few roundings of 2**-24 of its terms, and by 2**-9 of itself when it is stored in bfloat16.
"""

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from longtail.model.kernels import native
from longtail.model.kernels.ops import (
    HeadNorms,
    Kernels,
    NativeKernels,
    Places,
    select_kernels,
    text_places,
)
from longtail.model.rope import Rope, RopeConfig, Rotation

CPU = torch.device("cpu")
HEAD_DIMS = (16, 32, 64, 80, 96, 128)
DTYPES = (torch.float32, torch.bfloat16)
TORCH = Kernels()

needs_compiler = pytest.mark.skipif(
    native.unavailable_because() is not None, reason=str(native.unavailable_because())
)
sizes = settings(max_examples=60, deadline=None)
dtypes, seeds = st.sampled_from(DTYPES), st.integers(0, 2**31)


def native_kernels(dtype: torch.dtype) -> Kernels:
    kernels = select_kernels(dtype, 64)
    assert isinstance(kernels, NativeKernels)
    return kernels


def random(seed: int, *shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(dtype)


def of_weights(dtype: torch.dtype) -> float:
    """In 2**-20, what rounding weights to bfloat16, as AMX wants them, makes of a value."""
    return 2.0**12 if native.layout(dtype) == "tiles" else 0.0


def assert_same(mine: Tensor, exact: Tensor, terms: Tensor | float = 0.0) -> None:
    """Within 16 float32 roundings of the size of the terms, and some of the result as stored."""
    stored = 2.0**-8 if mine.dtype == torch.bfloat16 else 2.0**-22
    allowed = 2.0**-20 * terms + stored * exact.abs() + 1e-30
    wrong = (mine.double() - exact).abs() - allowed
    assert mine.isfinite().all()
    assert float(wrong.max()) <= 0, f"off by {float(wrong.max())} more than allowed"


@needs_compiler
@sizes
@given(
    tokens=st.integers(1, 6),
    hidden=st.integers(1, 400),
    dtype=dtypes,
    seed=seeds,
    scale=st.sampled_from([1e-6, 1.0, 1e4]),
    has_delta=st.booleans(),
)
def test_add_norm_is_its_definition(tokens, hidden, dtype, seed, scale, has_delta):
    stream, delta = random(seed, 2, tokens, hidden, dtype=dtype, scale=scale)
    weight, eps = 1 + 0.3 * random(seed + 1, hidden, dtype=dtype), 1e-6
    total = (stream.float() + delta.float()).to(dtype) if has_delta else stream.clone()
    result = native_kernels(dtype).add_norm(stream, delta if has_delta else None, weight, eps)
    assert result.stream.equal(total)
    exact = TORCH.add_norm(total.double(), None, weight.double(), eps).normed
    assert_same(result.normed, exact, terms=exact.abs())


@needs_compiler
@sizes
@given(
    tokens=st.integers(1, 5),
    kv_heads=st.integers(1, 4),
    group=st.integers(1, 8),
    head_dim=st.sampled_from(HEAD_DIMS),
    dtype=dtypes,
    seed=seeds,
    normed=st.booleans(),
)
def test_rotate_is_its_definition(tokens, kv_heads, group, head_dim, dtype, seed, normed):
    heads = kv_heads * group
    qkv = random(seed, tokens, heads + 2 * kv_heads, head_dim, dtype=dtype, scale=3.0)
    weights = 1 + 0.3 * random(seed + 1, 2, head_dim, dtype=dtype)
    norms = HeadNorms(heads, 1e-6, *(weights if normed else ()))
    positions = torch.randint(100_000, (tokens,), generator=torch.Generator().manual_seed(seed))
    kernels = native_kernels(dtype)
    rope = Rope(head_dim, RopeConfig())
    rotation = rope.rotation(positions, kernels.rotation_dtype(dtype))
    exact = TORCH.rotate(
        qkv.double(),
        HeadNorms(heads, 1e-6, *(weights.double() if normed else ())),
        Rotation(cos=rotation.cos.double(), sin=rotation.sin.double()),
    )
    mine = kernels.rotate(qkv, norms, rotation)
    for one, other in zip(mine, exact, strict=True):
        assert one.shape == other.shape
        assert_same(one, other, terms=other.abs().amax(-1, keepdim=True))
    assert mine.values.equal(qkv[:, heads + kv_heads :])


@needs_compiler
@sizes
@given(
    tokens=st.integers(1, 5),
    inner=st.integers(1, 300),
    dtype=dtypes,
    seed=seeds,
    scale=st.sampled_from([1e-4, 1.0, 30.0, 1e4]),
)
def test_swiglu_is_its_definition(tokens, inner, dtype, seed, scale):
    gate_up = random(seed, tokens, 2 * inner, dtype=dtype, scale=scale)
    exact = TORCH.swiglu(gate_up.double())
    # exp(-gate) is as wrong as its exponent, rounded relative to the gate. Where it leaves
    # float32's range, the result is 0 for all purposes.
    terms = exact.abs() * (1 + gate_up[:, :inner].double().abs()) + 1e-18
    assert_same(native_kernels(dtype).swiglu(gate_up), exact, terms)


@st.composite
def attention_cases(draw: st.DrawFn) -> dict[str, int | float | torch.dtype]:
    return {
        "head_dim": draw(st.sampled_from(HEAD_DIMS)),
        "kv_heads": draw(st.integers(1, 3)),
        "group": draw(st.integers(1, 8)),
        "num_rows": draw(st.integers(1, 4)),
        "row_len": draw(st.integers(1, 70) | st.just(700)),  # scratch space grows with it
        "tokens": draw(st.integers(1, 9)),
        "window": draw(st.sampled_from([0, 0, 1, 3, 16, 1000])),
        "dtype": draw(dtypes),
        "scale": draw(st.sampled_from([1e-3, 1.0, 30.0])),
        "share_seen": draw(st.sampled_from([0.0, 0.3, 0.9, 1.0])),
        "seed": draw(seeds),
    }


def random_places(
    tokens: int, num_rows: int, row_len: int, share_seen: float, generator: torch.Generator
) -> Places:
    """Tokens anywhere; each sees some of the slots behind its context, as nodes of a draft do."""
    rows, slots, contexts = (
        torch.randint(most, (tokens,), generator=generator) for most in (num_rows, row_len, row_len)
    )
    visible = []
    for context in contexts.tolist():
        behind = torch.rand(min(row_len - context - 1, 62), generator=generator) < share_seen
        visible.append(sum(1 << i for i, seen in enumerate(behind.tolist()) if seen))
    depths = torch.tensor([mask.bit_count() for mask in visible])
    return Places(rows, slots, contexts + 1, depths, torch.tensor(visible))


@needs_compiler
@sizes
@given(case=attention_cases())
def test_store_and_attend_rows(case):
    """Scores reach +-10,000 at the largest scale: most keys get weight 0, none overflows."""
    heads, kv_heads, dim = case["kv_heads"] * case["group"], case["kv_heads"], case["head_dim"]
    tokens, dtype, scale = case["tokens"], case["dtype"], case["scale"]
    generator = torch.Generator().manual_seed(case["seed"])
    shape = (case["num_rows"], case["row_len"], kv_heads, dim)
    key_rows, value_rows = random(case["seed"] + 1, 2, *shape, dtype=dtype, scale=scale)
    places = random_places(tokens, case["num_rows"], case["row_len"], case["share_seen"], generator)
    # As the decoder makes them: views of one projection.
    qkv = random(case["seed"], tokens, heads + 2 * kv_heads, dim, dtype=dtype, scale=scale)
    queries, keys, values = qkv.split([heads, kv_heads, kv_heads], 1)

    exact_keys, exact_values = key_rows.double(), value_rows.double()
    for t, (row, slot) in enumerate(zip(places.rows, places.slots, strict=True)):
        exact_keys[row, slot] = keys[t].double()  # one by one: the last of two at one place stays
        exact_values[row, slot] = values[t].double()
    kernels = native_kernels(dtype)
    kernels.store_rows(keys, values, key_rows, value_rows, places)
    assert key_rows.double().equal(exact_keys)
    assert value_rows.double().equal(exact_values)

    window = case["window"]
    mine = kernels.attend_rows(queries, key_rows, value_rows, places, window)
    exact = TORCH.attend_rows(queries.double(), exact_keys, exact_values, places, window)
    # An error d in a score moves the weighted mean by at most 2 d times the largest value.
    largest = float(queries.norm(dim=-1).max() * key_rows.float().norm(dim=-1).max()) * dim**-0.5
    terms = (1 + largest + of_weights(dtype)) * float(exact_values.abs().max())
    assert_same(mine, exact, terms=terms)


@needs_compiler
@settings(max_examples=100, deadline=None)
@given(
    case=attention_cases(),
    context=st.integers(1, 40),
    gaps=st.lists(st.integers(0, 5), min_size=1, max_size=8),
)
def test_a_token_gets_the_same_bits_wherever_its_ancestors_lie(case, context, gaps):
    """Rows are a text, a chain after its text, or scattered among siblings; alone or beside others.

    What law 1 stands on at working precision: verification computes what plain decoding would.
    """
    heads, kv_heads, dim = case["kv_heads"] * case["group"], case["kv_heads"], case["head_dim"]
    dtype, seed, depth = case["dtype"], case["seed"], len(gaps)
    window = max(case["window"], depth + 1) if case["window"] else 0  # a draft fits into a window
    scattered = [context + i + sum(gaps[: i + 1]) for i in range(depth)]
    row_len = scattered[-1] + 1
    keys, values = random(seed, 2, 3, row_len, kv_heads, dim, dtype=dtype, scale=case["scale"])
    for rows in (keys, values):  # the same tokens in all three rows, elsewhere
        rows[:, :context] = rows[0, :context].clone()
        rows[2, scattered] = rows[0, context : context + depth].clone()
        rows[1, context : context + depth] = rows[0, context : context + depth].clone()
    mask = sum(1 << (slot - context) for slot in scattered)
    columns = [
        (0, context + depth - 1, context + depth, 0, 0),
        (1, context + depth - 1, context, depth, (1 << depth) - 1),
        (2, scattered[-1], context, depth, mask),
    ]
    generator = torch.Generator().manual_seed(seed)
    others = random_places(case["tokens"], 3, row_len, case["share_seen"], generator)
    mine = Places(*torch.tensor(columns).T.contiguous())
    together = Places(*(torch.cat(parts) for parts in zip(others, mine, strict=True)))
    queries = random(seed + 1, case["tokens"] + 3, heads, dim, dtype=dtype, scale=case["scale"])
    queries[-3:] = queries[-1]
    kernels = native_kernels(dtype)
    batch = kernels.attend_rows(queries, keys, values, together, window)
    assert batch[-3].equal(batch[-2])
    assert batch[-3].equal(batch[-1])
    for token in range(len(queries)):
        alone = Places(*(each[token : token + 1].clone() for each in together))
        assert kernels.attend_rows(queries[token : token + 1], keys, values, alone, window).equal(
            batch[token : token + 1]
        )


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_finite_is_passed_on(dtype):
    """The engine finds NaN weights by their logits, so kernels must pass NaN on."""
    kernels, bad = native_kernels(dtype), torch.tensor(torch.nan).to(dtype)
    stream = random(0, 2, 40, dtype=dtype)
    stream[0, 7] = bad
    normed = kernels.add_norm(stream, None, torch.ones(40, dtype=dtype), 1e-6).normed
    assert normed[0].isnan().all()
    assert normed[1].isfinite().all()
    gate_up = random(0, 1, 10, dtype=dtype)
    gate_up[0, 1] = gate_up[0, 8] = bad
    assert kernels.swiglu(gate_up).isnan().tolist() == [[False, True, False, True, False]]
    keys, values = random(1, 2, 2, 5, 1, 16, dtype=dtype)
    queries = random(2, 2, 1, 16, dtype=dtype)
    places = text_places(torch.arange(2), torch.full((2,), 3))
    keys[0, 2] = values[1, 4] = bad  # seen by the first token; not yet seen by the second
    seen = kernels.attend_rows(queries, keys, values, places, 0)
    assert seen[0].isnan().all()
    assert seen[1].isfinite().all()
    # Slots 3 and 4 as nodes: two siblings of which only one is bad.
    places = Places(*torch.tensor([[1, 1], [3, 4], [3, 3], [1, 1], [0b1, 0b10]]))
    siblings = kernels.attend_rows(queries, keys, values, places, 0)
    assert siblings[0].isfinite().all()
    assert siblings[1].isnan().all()


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_threads_share_the_work_and_not_their_scratch_space(dtype):
    keys, values = random(0, 2, 5, 90, 2, 32, dtype=dtype)
    queries = random(1, 20, 14, 32, dtype=dtype)
    places = text_places(torch.arange(20) % 5, torch.arange(20) * 4 + 9)
    kernels = native_kernels(dtype)
    alone = kernels.attend_rows(queries, keys, values, places, 0)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        together = [kernels.attend_rows(queries, keys, values, places, 0) for _ in range(20)]
    finally:
        torch.set_num_threads(before)
    assert all(each.equal(alone) for each in together)


def test_native_kernels_are_chosen_where_they_exist(monkeypatch):
    assert type(select_kernels(torch.float64, 64)) is Kernels
    assert type(select_kernels(torch.float32, 48)) is Kernels
    monkeypatch.setenv("LONGTAIL_NATIVE", "0")
    monkeypatch.setattr(native, "_loaded", native._loaded.__wrapped__)
    native.functions.cache_clear()
    assert type(select_kernels(torch.float32, 64)) is Kernels
    assert native.unavailable_because() == "LONGTAIL_NATIVE=0 is set"
    monkeypatch.undo()
    native.functions.cache_clear()
    if native.unavailable_because() is None:
        for dtype in DTYPES:
            for head_dim in HEAD_DIMS:
                assert isinstance(select_kernels(dtype, head_dim), NativeKernels)


@needs_compiler
def test_loading_the_kernels_leaves_subnormal_numbers_alone():
    """gcc 12 links what is built by -ffast-math so that loading it flushes them to 0, everywhere.

    Hypothesis then refuses to draw floats, and float64 results depend on who loaded what before.
    """
    native_kernels(torch.float32)
    assert 5e-324 * 1.0 > 0.0
    assert float((torch.tensor([1e-310], dtype=torch.float64) * 1.0)[0]) == 1e-310


def test_a_missing_compiler_is_reported_once(monkeypatch, caplog):
    monkeypatch.delenv("LONGTAIL_NATIVE", raising=False)
    monkeypatch.setattr(native.platform, "system", lambda: "Linux")
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    monkeypatch.setattr(native, "_loaded", cache(native._loaded.__wrapped__))
    for dtype in (*DTYPES, *DTYPES):
        assert native.functions.__wrapped__(dtype) is None
        assert native.layout.__wrapped__(dtype) is None
    (record,) = caplog.records
    assert "no C compiler: install one" in record.getMessage()
