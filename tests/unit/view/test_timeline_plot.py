import sys

import numpy as np
import pytest
from matplotlib.image import imread

from longtail.errors import ConfigError
from longtail.view.timeline_plot import _LOOKS, draw
from support.fakes import do_without
from support.timelines import LETTERS, drawn

PLAIN = drawn("G.L", "G.L")


def test_a_plot_shows_each_state_in_its_own_colour(tmp_path):
    path = tmp_path / "timeline.png"
    for states in ("".join(LETTERS), "s."):
        draw([("step", drawn(states))], path)
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
        assert shown == {LETTERS[letter] for letter in states}


def test_a_plot_has_a_transparent_background_and_is_the_same_file_each_time(tmp_path):
    files = [tmp_path / name for name in ("a.svg", "b.svg")]
    for file in files:
        draw([("off", PLAIN)], file)
    assert files[0].read_bytes() == files[1].read_bytes()
    draw([("off", PLAIN)], tmp_path / "c.png")
    assert imread(tmp_path / "c.png")[0, 0, 3] == 0


def test_without_matplotlib_the_error_names_the_remedy(tmp_path, monkeypatch):
    do_without(monkeypatch, "matplotlib")
    with pytest.raises(ConfigError, match=rf"matplotlib: {sys.executable} -m pip install"):
        draw([("off", PLAIN)], tmp_path / "timeline.png")
    assert not list(tmp_path.iterdir())
