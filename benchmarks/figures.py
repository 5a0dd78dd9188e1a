"""Draw the pictures of the pages anew, from the cards in this directory.

    python benchmarks/figures.py [FOLDER]     FOLDER is docs/img unless another is given

Nothing is measured here. `make figures` calls it.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import timeline_plot
from longtail.cluster.workers.states import Span, State, Timeline
from longtail.sampling import gumbel_noise, noise_key
from timeline_plot import BLUE, GREY, INK, ORANGE, TITLE, blank, write

CARDS = Path(__file__).resolve().parent
IMAGES = CARDS.parent / "docs" / "img"


def card(name: str) -> dict[str, Any]:
    """Return the numbers of a card."""
    return json.loads((CARDS / name).read_text(encoding="utf-8"))


def tail(path: Path) -> None:
    """One training step of two workers, without drafting and with longtail."""
    steps = card("e2e_quickstart.json")["last_step"]
    arms = {"Without drafting": "off", "With longtail": list(steps)[-1]}
    timeline_plot.draw([(name, timeline(steps[arm])) for name, arm in arms.items()], path)


def timeline(row: dict[str, Any]) -> Timeline:
    """Return the states that `Timeline.as_json` gave, without marks."""
    spans = tuple(
        Span(worker=worker, state=State(state), begin_s=begin_s, end_s=end_s)
        for worker, state, begin_s, end_s in row["spans"]
    )
    return Timeline(spans=spans, marks=(), begin_s=0.0, end_s=row["end_s"])


WORDS = ("seven", "eight", "nine", "ten", "one", "a")
PROBABILITIES = (0.42, 0.23, 0.14, 0.1, 0.07, 0.04)


def keyed_noise(path: Path) -> None:
    """A draw by keyed noise at one position, and the frequency of each word over many keys."""
    logprobs = np.log(PROBABILITIES)
    figure = blank(11.0, 3.6)
    one, many = figure.subplots(1, 2, width_ratios=(1.25, 1))
    keys = torch.tensor([noise_key(0, "example", sample) for sample in range(10_000)])
    noise = gumbel_noise(keys, torch.full_like(keys, 17), len(WORDS)).double().numpy()
    draws = (logprobs + noise).argmax(1)
    scores = logprobs + noise[np.flatnonzero(draws == 2)[0]]  # not the most probable word
    rows = np.arange(len(WORDS))
    one.barh(rows + 0.2, logprobs, 0.36, color=BLUE)
    drawn = int(scores.argmax())
    colors = [ORANGE if row == drawn else GREY for row in rows]
    one.barh(rows - 0.2, scores, 0.36, color=colors)
    one.axvline(0, color=INK, linewidth=0.8)
    one.set_yticks(rows, WORDS)
    one.set_xlabel("nats")
    one.set_title("One position of one request", **TITLE)
    low = float(min(logprobs.min(), scores.min()))
    high = float(scores.max())
    one.set_xlim(1.1 * low, high + 2.6)
    beside: dict[str, Any] = {"va": "center", "fontsize": 9, "fontweight": "bold"}
    one.text(0.1, rows[0] + 0.2, "log p", color=BLUE, **beside)
    winner = "log p + noise: the highest is drawn"
    one.text(max(scores[drawn], 0) + 0.1, drawn - 0.2, winner, color=ORANGE, **beside)
    shares = np.bincount(draws, minlength=len(WORDS)) / len(keys)
    many.barh(rows, shares, 0.62, color=ORANGE, alpha=0.85)
    many.plot(PROBABILITIES, rows, linestyle="", marker="|", markersize=20, color=BLUE, mew=3)
    many.set_yticks(rows, WORDS)
    many.set_xlabel("share of 10,000 keys")
    many.set_title("The same position under 10,000 keys", **TITLE)
    many.text(shares[0] + 0.02, 0.16, "p", color=BLUE, **beside)
    many.text(shares[1] + 0.02, 1, "how often it is drawn", color=ORANGE, **beside)
    many.set_xlim(0, 0.56)
    for panel in (one, many):
        panel.set_ylim(len(WORDS) - 0.4, -0.6)
        panel.grid(axis="x", color=GREY, alpha=0.3, linewidth=0.6)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
    write(figure, path)


FIGURES: Mapping[str, Callable[[Path], None]] = {
    "tail.svg": tail,
    "keyed-noise.svg": keyed_noise,
}


def main(words: Sequence[str]) -> None:
    """Draw all pictures into a folder."""
    folder = Path(words[0]) if words else IMAGES
    for name, draw in FIGURES.items():
        draw(folder / name)
        print(folder / name)


if __name__ == "__main__":
    main(sys.argv[1:])
