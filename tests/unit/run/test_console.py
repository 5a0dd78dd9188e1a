import io
import sys
import threading

import pytest

from longtail.cluster.records import Progress
from longtail.generator import Verified
from longtail.run.console import Console
from support.rollouts import step_report

METRICS = {
    "reward/mean": 0.4137, "response_length/p50": 96.0, "response_length/max": 1024.0,
    "rollout/tail_idle_share": 0.61, "rollout/tokens_per_s": 12345.6, "timing_s/rollout": 6.21,
    "timing_s/step": 8.0,
}  # fmt: skip


DRAFT = Verified(request_id="a", position=0, num_drafted=3, depth=3, num_accepted=1)


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_step_is_one_line_on_any_terminal_width(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    Console().step(7, 100, METRICS)
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        "step   7/100  reward 0.414  length p50 96 max 1024  tail idle 61%  12,346 tokens/s  "
        "rollout 6.2 s of 8.0 s\n"
    )


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def _lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    out, err = capsys.readouterr()
    assert out == ""
    return err.splitlines()


def test_without_a_terminal_ten_silent_seconds_are_followed_by_a_line(capsys):
    clock = _Clock()
    console = Console("bench: ", clock=clock)
    with console.phase("step", "1/2"), console.phase("learning"):
        for second in range(1, 30):
            clock.now = float(second)
            console.beat()
            if second == 15:
                console.log("a line")
    assert _lines(capsys) == [
        "bench: step 1/2, learning: 10 s so far",
        "bench: a line",
        "bench: step 1/2, learning: 25 s so far",
    ]
    clock.now = 1000.0
    console.beat()  # nothing is being done
    assert _lines(capsys) == []


def test_a_phase_beats_while_its_work_blocks(monkeypatch):
    seen, before = threading.Event(), set(threading.enumerate())
    monkeypatch.setattr(Console, "beat", lambda _: seen.set())
    with Console().phase("loading"):
        assert seen.wait(60)
    assert set(threading.enumerate()) <= before


def test_the_first_text_is_shown_once_on_one_line(capsys):
    clock = _Clock()
    console = Console(clock=clock)
    texts = ["", "  12 + 30\n\x1b[31m= 42\x07" + "!" * 1000, "later"]
    for text in texts:
        with console.phase("rollout", total=4):
            clock.now += 10.0
            progress = Progress(num_finished=1, num_generated=50, num_running=2, text=text)
            console.rollout_progress(progress)
            console.beat()
    first, shown, last = _lines(capsys)
    assert first == "rollout: 1/4 done, 2 running, 5 tokens/s, about 30 s left"
    assert shown.startswith("first text: 12 + 30 [31m= 42 !!!")
    assert shown.endswith("! ...")
    assert len(shown) < 150
    assert last == "rollout: 1/4 done, 2 running, 5 tokens/s, about 30 s left"


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({}, ""),
        ({"speculates": True}, " plain,"),
        ({"speculates": True, "verified": (DRAFT,)}, " drafting,"),
    ],
)
def test_a_terminal_shows_a_live_line_and_clears_it(monkeypatch, changes, word):
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "60")
    console = Console()
    with console.phase("step", "1/2"), console.phase("rollout", total=4):
        console.rollout_step(step_report(3, **changes))
        console.beat()
    line = f"step 1/2, rollout: 0/4 done, 3 running,{word} 0 tokens/s, 0 s so far"
    assert terminal.getvalue().endswith(f"\r\x1b[2K{line[:59]}")
    console.log("done")
    assert terminal.getvalue().endswith("\r\x1b[2Kdone\n")


def test_no_end_is_guessed_in_the_tail_of_a_rollout(capsys):
    clock = _Clock()
    console = Console(clock=clock)
    with console.phase("rollout", total=4):
        clock.now += 10.0
        console.rollout_progress(Progress(num_finished=3, num_generated=50, num_running=1))
        console.beat()
    assert _lines(capsys)[0] == "rollout: 3/4 done, 1 running, 5 tokens/s, 10 s so far"
