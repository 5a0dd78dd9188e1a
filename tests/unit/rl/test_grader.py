import json
import pickle
import signal
import socket
import subprocess
import sys

import pytest

from longtail.errors import ConfigError
from longtail.rl.grading.grader import GRADE, describe, frame, read_frame
from longtail.rl.grading.supervisor import SIGNALLED

HANG = """
import re
def in_c(**columns):
    re.match("(a+)+$", "a" * 64 + "b")  # never ends, and never lets another thread run
"""


def raised(function):
    with pytest.raises(Exception) as caught:  # noqa: PT011
        function()
    return caught.value


def test_frames_are_read_whole_from_any_pieces():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sent = frame(b"one") + frame(b"") + frame(b"three")
        for byte in sent:
            ours.sendall(bytes([byte]))
        ours.shutdown(socket.SHUT_WR)
        assert [read_frame(theirs) for _ in range(4)] == [b"one", b"", b"three", None]


def test_an_incomplete_frame_is_the_end():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(frame(b"three")[:-1])
        ours.shutdown(socket.SHUT_WR)
        assert read_frame(theirs) is None


def test_a_reward_error_is_described_with_type_and_place():
    text = describe(raised(lambda: 1 / 0))
    assert text.startswith("ZeroDivisionError: division by zero (test_grader.py:")


def test_longtail_errors_are_described_by_their_message():
    assert describe(ConfigError("a.b = 3: too many")) == "a.b = 3: too many"


def test_a_long_error_is_cut():
    assert len(describe(ValueError("x" * 100_000))) < 2100


@pytest.fixture
def start(tmp_path):
    """Start a bare grader process without a pool."""
    (tmp_path / "hang.py").write_text(HANG)
    started = []

    def launch(reward):
        program = (
            "import sys, json; sys.path[:] = path = json.loads(sys.argv[1]); "
            f"from longtail.rl.grading.grader import serve; serve({reward!r}, path)"
        )
        ours, theirs = socket.socketpair()
        ours.settimeout(60)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", program, json.dumps([str(tmp_path), *sys.path])],
                stdin=theirs.fileno(),
                stderr=subprocess.DEVNULL,
            )
        started.append((process, ours))
        return process, ours

    yield launch
    for process, ours in started:
        ours.close()
        process.kill()
        process.wait(timeout=60)


def batch(*texts):
    fields = [("6*7=", text, (1,), {"answer": "42"}) for text in texts]
    return frame(pickle.dumps((GRADE, [(i, pickle.dumps(f)) for i, f in enumerate(fields)])))


def test_a_grader_is_ready_answers_each_task_and_ends_with_its_parent(start):
    process, channel = start("exact")
    assert json.loads(read_frame(channel)) == {"loading": True}
    assert json.loads(read_frame(channel)) == {"ready": True}
    channel.sendall(batch("42", "41"))
    assert json.loads(read_frame(channel)) == {"begun": True}
    assert json.loads(read_frame(channel)) == [0, 1.0, None]
    assert json.loads(read_frame(channel)) == [1, 0.0, None]
    channel.close()
    assert process.wait(timeout=60) in (
        0,
        SIGNALLED + signal.SIGKILL,
    )  # grader or supervisor may be first


def test_a_grader_reports_a_reward_that_cannot_be_loaded(start):
    process, channel = start("hang:none")
    assert json.loads(read_frame(channel)) == {"loading": True}
    assert "has no 'none'" in json.loads(read_frame(channel))["refused"]
    assert process.wait(timeout=60) == 0


def test_a_grader_that_hangs_ends_with_its_parent(start):
    process, channel = start("hang:in_c")
    assert json.loads(read_frame(channel)) == {"loading": True}
    assert json.loads(read_frame(channel)) == {"ready": True}
    channel.sendall(batch("42"))
    assert json.loads(read_frame(channel)) == {"begun": True}
    channel.close()
    assert process.wait(timeout=60) == SIGNALLED + signal.SIGKILL


def test_unprintable_characters_of_an_error_are_blank():
    assert describe(ValueError("no\n\x1b[2J\ud83d way")) == "ValueError: no  [2J  way"
