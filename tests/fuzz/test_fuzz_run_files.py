"""Files of a run directory, whatever they hold: a value, or the documented error."""

import contextlib
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longtail.cluster.timeline import Timeline, TraceFile
from longtail.config import files as configfile
from longtail.config.rl import RunConfig
from longtail.engine.rollout_log import read_rollout
from longtail.errors import ConfigError
from longtail.report.page import render
from longtail.run.checkpoint import RunDirectory
from longtail.run.metrics import JsonLines
from longtail.run.summary import read_metrics, read_summary, summarize_run
from longtail.system.files import open_sealed
from longtail.tuner.cost_file import load_costs

numbers = st.sampled_from([0, 1, -1, 2, 10**12, 10**400, 1e308, 0.5, float("nan"), float("inf")])
scalars = st.none() | st.booleans() | numbers | st.integers() | st.text(max_size=5)
names = st.sampled_from(
    [
        *("step", "kind", "seconds", "running", "drafts", "nodes", "accepted", "readings"),
        *("switches", "ts", "dur", "ph", "tid", "args", "reward/mean", "timing_s/step", "format"),
        *(
            "files",
            "state",
            "sha256",
            "timing_s/rollout",
            "response_length/max",
            "eval/reward_mean",
        ),
    ]
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=4),
    max_leaves=8,
)
lines = st.one_of(
    values.map(lambda value: json.dumps(value).encode()),
    st.dictionaries(names, values, min_size=1).map(lambda row: json.dumps(row).encode()),
    st.binary(max_size=20),
    st.sampled_from([b"[" * 50_000, b'{"step": ' + b"9" * 5000 + b"}", b"", b"\xff\xfe"]),
)
texts = st.lists(lines, max_size=4).map(b"\n".join) | lines.map(lambda line: line + b"\n")
SERIES = {
    **{"seconds": [0.1], "running": [1], "drafts": [0], "nodes": [0], "accepted": [0]},
    **{"readings": [[0.1]], "switches": [[0, True, "why"]]},
}


@pytest.mark.slow
@given(texts, st.none() | st.integers(0, 3))
def test_a_log_of_any_bytes_is_cut_back_and_gone_on_with(text: bytes, last: int | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "metrics.jsonl")
        path.write_bytes(text)
        lines = JsonLines(path, last_step=last)
        lines.write(4, {"reward/mean": 0.5, "timing_s/step": 1.0})
        lines.close()
        rows = read_metrics(path)
        assert rows[-1]["step"] == 4
        assert all(row["step"] <= (last or 0) for row in rows[:-1])
        summarize_run(rows, steps=4, reward_after=None, seconds=1.0, warm_start_s=0.0).lines(path)


@pytest.mark.slow
@given(texts)
def test_metrics_of_any_bytes_make_a_summary(text: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "metrics.jsonl")
        path.write_bytes(text)
        rows = read_metrics(path)
        summary = summarize_run(rows, steps=4, reward_after=None, seconds=1.0, warm_start_s=0.0)
        summary.write(Path(folder, "summary.json"))
        path.with_name("summary.json").write_bytes(text)
        with contextlib.suppress(ValueError):
            read_summary(path.with_name("summary.json")).lines(path)


@pytest.mark.slow
@given(st.dictionaries(st.sampled_from(list(SERIES)), values, max_size=2), texts)
def test_a_rollout_of_any_values_is_shown_or_refused(changes: dict[str, Any], text: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "speculation.jsonl")
        row = {"step": 1, "kind": "training", **SERIES, **changes}
        path.write_bytes(text + b"\n" + json.dumps(row).encode() + b"\n")
        path.with_name("metrics.jsonl").write_bytes(text)
        with contextlib.suppress(ConfigError):
            render(path.parent, read_rollout(path), "")


@pytest.mark.slow
@given(texts, st.none() | st.integers(0, 3))
def test_a_trace_of_any_bytes_is_gone_on_with(text: bytes, last: int | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        path.write_bytes(b"[\n" + text.replace(b"\n", b",\n") + b",\n")
        trace = TraceFile(path, last_step=last)
        trace.append(4, Timeline(spans=(), marks=(), begin_s=0.0, end_s=1.0))
        trace.close()


@given(texts)
def test_costs_of_any_bytes_are_read_or_refused(text: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "cost.json")
        path.write_bytes(text)
        with contextlib.suppress(ConfigError):
            load_costs(path)


@pytest.mark.slow
@given(texts)
def test_a_seal_of_any_bytes_is_opened_or_refused(text: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "state.json").write_bytes(text)
        with contextlib.suppress(ValueError, OSError):
            open_sealed(Path(folder), "state.json")


@pytest.mark.slow
@given(texts)
def test_a_run_with_any_configuration_is_gone_on_with_or_refused(text: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        with RunDirectory(Path(folder)) as run:
            run.start(configfile.render(RunConfig()), resume=True)
            run.save(1, lambda path: None, {}, {"cursor": 1})
        Path(folder, "config.toml").write_bytes(text)
        with RunDirectory(Path(folder)) as run, contextlib.suppress(ConfigError):
            run.start(configfile.render(RunConfig()), resume=True)
