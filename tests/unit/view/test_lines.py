"""Lines of logs: following a file, and finding a step without an index."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longtail.view import lines
from longtail.view.lines import (
    AppendedLines,
    lines_of,
    open_regular,
    step_of_event,
    step_of_row,
)


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
        damaged = list(whole)
        for place, junk in damage:
            damaged.insert(min(place, len(damaged)), junk)
        path.write_bytes(b"".join(damaged))
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


def test_a_large_log_is_read_in_parts_and_its_endless_line_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "_MOST_BYTES", 64)
    path, before, after = tmp_path / "log", rows(*range(1, 10)), rows(*range(11, 20))
    path.write_bytes(b"".join(before) + b"0" * 1000 + b"\n" + b"".join(after))
    log, seen, offset = AppendedLines(path), [], -1
    while log.offset > offset:
        offset = log.offset
        found = log.read().lines
        assert sum(map(len, found)) <= 64
        seen += [line for line in found if step_of_row(line) is not None]
    assert seen == before + after
    assert offset == path.stat().st_size


def test_a_search_ends_after_a_bounded_number_of_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"0" * 10_000 + b"\n" + b"".join(rows(1)))
    assert lines_of(path, 1, step_of_row) == rows(1)
    monkeypatch.setattr(lines, "_MOST_BYTES", 100)
    monkeypatch.setattr(lines, "_MOST_SEARCHED", 1000)
    assert lines_of(path, 1, step_of_row) == []


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_file_without_an_end_is_not_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "log"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    assert AppendedLines(path).read().lines == ()
    assert lines_of(path, 1, step_of_row) == []
    with pytest.raises(OSError, match="no regular file"):
        open_regular(path)


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
