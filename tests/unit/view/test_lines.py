"""Lines of logs: following a file, and finding a step without an index."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longtail.view.lines import AppendedLines, lines_of, step_of_event, step_of_row


def rows(*steps: int) -> list[bytes]:
    return [json.dumps({"step": step, "n": n}).encode() + b"\n" for n, step in enumerate(steps)]


def test_the_lines_of_every_step_are_found_without_an_index(tmp_path: Path) -> None:
    path = tmp_path / "log"

    @given(
        counts=st.lists(st.integers(0, 5), max_size=12),
        damage=st.lists(
            st.tuples(st.integers(0, 40), st.sampled_from([b"\n", b"{\n", b"x" * 90 + b"\n"]))
        ),
    )
    def law(counts: list[int], damage: list[tuple[int, bytes]]) -> None:
        whole = rows(*(step for step, count in enumerate(counts, 1) for _ in range(count)))
        lines = list(whole)
        for place, junk in damage:
            lines.insert(min(place, len(lines)), junk)
        path.write_bytes(b"".join(lines))
        for step in range(len(counts) + 2):
            expected = [line for line in whole if json.loads(line)["step"] == step]
            assert lines_of(path, step, step_of_row) == expected

    law()


def test_a_half_written_line_waits_until_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "log"
    first, second = rows(1, 2)
    log = AppendedLines(path)
    seen: list[bytes] = []
    path.touch()
    for end in range(len(first + second) + 1):  # the file grows byte by byte
        path.write_bytes((first + second)[:end])
        appended = log.read()
        seen = [*(() if appended.is_new else seen), *appended.lines]
        assert seen == [first, second][: (end >= len(first)) + (end == len(first + second))]
    assert log.read().lines == ()


@pytest.mark.parametrize("how", ["renamed", "rewritten", "cut back", "removed"])
def test_a_replaced_file_is_read_from_its_beginning(tmp_path: Path, how: str) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"".join(rows(1, 2, 3)))
    log = AppendedLines(path)
    assert len(log.read().lines) == 3
    new = rows(1, 2) if how == "cut back" else rows(1, 5, 6, 7)
    if how == "renamed":
        (tmp_path / "new").write_bytes(b"".join(new))
        os.replace(tmp_path / "new", path)
    elif how == "removed":
        path.unlink()
        assert log.read().is_new
        path.write_bytes(b"".join(new))
    else:
        path.write_bytes(b"".join(new))
    appended = log.read()
    assert appended.is_new
    assert list(appended.lines) == new


def test_the_step_of_a_trace_event_stands_at_its_end() -> None:
    line = (
        b'{"name": "{\\"step\\": 9}}", "ph": "M", "tid": 0, "args": {"name": "w", "step": 12}},\n'
    )
    assert step_of_event(line) == 12
    assert step_of_event(b"[\n") is None
    assert step_of_row(b'{"step": 12, "x": 1}') == 12
    assert step_of_row(b'{"st') is None
