import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from longtail.cluster.states import State
from longtail.cluster.timeline import Mark, Span, Timeline
from longtail.errors import ConfigError
from longtail.view.timeline_plot import _LOOKS, draw
from support.fakes import do_without


def _step(workers: int, *states: State, marks: int = 0, begin_s: float = 100.0) -> Timeline:
    """Every worker goes through the states, a second each."""
    spans = tuple(
        Span(worker=worker, state=state, begin_s=begin_s + second, end_s=begin_s + second + 1)
        for worker in range(workers)
        for second, state in enumerate(states)
    )
    return Timeline(
        spans=spans,
        marks=tuple(
            Mark(worker=mark % workers, at_s=begin_s + 0.1 * mark, name=f"drafter ${mark} $")
            for mark in range(marks)
        ),
        begin_s=begin_s,
        end_s=begin_s + len(states),
    )


PLAIN = _step(2, State.GENERATING, State.IDLE, State.LEARNING)


def test_a_plot_shows_each_state_in_its_own_colour(tmp_path: Path) -> None:
    path = tmp_path / "timeline.png"
    for states in (tuple(State), (State.SPOT, State.IDLE)):
        draw([("step", _step(1, *states))], path)
        pixels = np.rint(255 * imread(path)[:, :, :3]).astype(int)
        wanted = {
            s: [int(color[at : at + 2], 16) for at in (1, 3, 5)] for s, (color, _) in _LOOKS.items()
        }
        shown = {
            state
            for state, color in wanted.items()
            if np.all(abs(pixels - color) <= 2, axis=2).sum()
            > 5000  # more than its legend's square
        }
        assert shown == set(states)


def test_a_plot_has_a_transparent_background_and_is_the_same_file_each_time(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.svg", "b.svg")]
    for file in files:
        draw([("off", PLAIN)], file)
    assert files[0].read_bytes() == files[1].read_bytes()
    draw([("off", PLAIN)], tmp_path / "c.png")
    assert imread(tmp_path / "c.png")[0, 0, 3] == 0


def test_without_matplotlib_the_error_names_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    do_without(monkeypatch, "matplotlib")
    with pytest.raises(ConfigError, match=rf"matplotlib: {sys.executable} -m pip install"):
        draw([("off", PLAIN)], tmp_path / "timeline.png")
    assert not list(tmp_path.iterdir())
