"""Lines of logs: finding those of a step without an index."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longtail.view import series
from longtail.view.series import read_step


def test_the_lines_of_every_step_are_found_without_an_index(tmp_path: Path) -> None:
    path = tmp_path / "log"

    @given(
        counts=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 90)), max_size=12),
        torn=st.integers(0, 40),
        is_trace=st.booleans(),
    )
    def law(counts: list[tuple[int, int]], torn: int, is_trace: bool) -> None:
        rows = [
            {"x": "x" * size, "args": {"step": step}} if is_trace else {"step": step, "x": size}
            for step, (count, size) in enumerate(counts, 1)
            for _ in range(count)
        ]
        written = [json.dumps(row) + (",\n" if is_trace else "\n") for row in rows]
        half = json.dumps({"step": len(counts) + 1, "x": "half-written"})[:torn]
        path.write_text("".join([*(["[\n"] if is_trace else []), *written, half]))
        for step in range(len(counts) + 3):
            expected = [row for row in rows if (row.get("args") or row)["step"] == step]
            assert read_step(path, step) == expected

    law()


def test_a_step_and_a_line_are_read_up_to_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    rows = [json.dumps({"step": 1, "n": n}) + "\n" for n in range(9)]
    path.write_text("".join(rows))
    monkeypatch.setattr(series, "MOST_BYTES", 3 * len(rows[0]))
    assert [row["n"] for row in read_step(path, 1)] == [0, 1, 2]
    path.write_bytes(b'{"step": 1, "x": "' + b"x" * 1000 + b'"}\n')
    assert read_step(path, 1) == []
