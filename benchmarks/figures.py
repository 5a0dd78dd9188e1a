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
from longtail.bench.e2e.plot import draw_curves

from longtail.cluster.timeline import Timeline
from longtail.engine.rollout_log import read_rollout
from longtail.report import rollout_plot, timeline_plot
from longtail.report.plots import (
    BLUE,
    GREY,
    INK,
    ORANGE,
    TITLE,
    blank,
    frame,
    label_lines,
    write,
)
from longtail.sampling import gumbel_noise, noise_key

CARDS = Path(__file__).resolve().parent
IMAGES = CARDS.parent / "docs" / "img"


def card(name: str) -> dict[str, Any]:
    """Return the numbers of a card."""
    return json.loads((CARDS / name).read_text(encoding="utf-8"))


def tail(path: Path) -> None:
    """One training step of two workers, without drafting and with longtail."""
    steps = card("e2e_tail.json")["last_step"]
    arms = {"Without drafting": "off", "With longtail": "spot"}
    timelines = [(name, Timeline.of_json(steps[arm] | {"marks": []})) for name, arm in arms.items()]
    timeline_plot.draw(timelines, path)


def spot_training(path: Path) -> None:
    """Accept length while the policy moves, of a frozen drafter and of one that is trained."""
    draw_curves(card("e2e_moving.json")["accept_length"], path)


def cold_start(path: Path) -> None:
    """Accept length of a drafter with fresh weights, beside drafters trained before."""
    draw_curves(card("e2e_bf16.json")["accept_length"], path)


def rollout(path: Path) -> None:
    """One rollout: running requests, draft tokens and accept length."""
    logged = read_rollout(CARDS / "rollout_trace.jsonl")
    series = logged.series
    title = (
        f"One rollout of {max(series.running)} requests on one worker, engine step by engine step"
    )
    rollout_plot.draw(series, path, title=title)


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
        frame(panel, grid="x")
    write(figure, path)


def coupled_drafts(path: Path) -> None:
    """Accept length by temperature, with coupled drafts and without."""
    coupling = card("rollout.json")["coupling"]
    subjects = (
        ("text", "eagle3", "Ordinary text: 3.7 nats per token at temperature 1"),
        ("tiny", "eagle1", "A trained reasoner: 0.3 nats per token at temperature 1"),
    )
    figure = blank(11.0, 3.6)
    panels = figure.subplots(1, 2, sharey=True)
    for panel, (model, drafter, title) in zip(panels, subjects, strict=True):
        rows = [row for row in coupling[model] if row["drafter"] == drafter]
        at = [row["temperature"] for row in rows]
        lines = []
        for kind, color in (("coupled", ORANGE), ("uncoupled", BLUE)):
            values = [row[kind] for row in rows]
            panel.plot(at, values, color=color, marker="o", linewidth=2)
            label = f"{kind}: {values[-1]:.2f}"
            lines.append((label, color, at[-1], values[-1]))
        panel.set_title(title, **TITLE)
        panel.set_xlabel("temperature")
        panel.set_xticks(at)
        panel.set_ylim(1, 6.5)
        frame(panel)
        label_lines(panel, lines)
    panels[0].set_ylabel("accept length, chains of 6")
    write(figure, path)


DRAFTERS = {
    "good": "A good drafter",
    "mediocre": "30 % of its tokens spoiled",
    "adversarial": "All of its tokens wrong",
}


def draft_budget(path: Path) -> None:
    """Speedup by running requests: the best fixed strategy, and what the engine decides."""
    points = card("tuner.json")["points"]
    figure = blank(11.0, 4.0)
    panels = figure.subplots(1, 3, sharey=True, width_ratios=(1.5, 1, 1))
    for panel, (drafter, title) in zip(panels, DRAFTERS.items(), strict=True):
        own = [point for point in points if point["drafter"] == drafter]
        running = [point["running"] for point in own]
        fixed = [point["vs_off"][point["best_fixed"]]["median"] for point in own]
        chosen = [point["vs_off"]["budget"] for point in own]
        panel.plot(running, fixed, color=BLUE, linewidth=1.6, marker="o", markersize=6)
        medians = [each["median"] for each in chosen]
        panel.plot(running, medians, color=ORANGE, linewidth=2.6, marker="o", markersize=4)
        low, high = ([each[end] for each in chosen] for end in ("low", "high"))
        panel.vlines(running, low, high, color=ORANGE, linewidth=2.6, alpha=0.5)
        panel.axhline(1, color=INK, linewidth=0.9, linestyle=":")
        panel.set_xscale("log", base=2)
        panel.set_xticks(running, [str(number) for number in running])
        panel.set_xlabel("running requests")
        panel.set_title(title, **TITLE)
        panel.set_ylim(0, 5.8)
        frame(panel)
    panels[0].set_ylabel("tokens/s relative to plain decoding")
    beside: dict[str, Any] = {"fontsize": 9.5, "fontweight": "bold"}
    panels[0].text(2.15, 4.35, "longtail decides", color=ORANGE, **beside)
    best = "best fixed strategy,\nfound by trying all"
    panels[0].text(4.4, 3.2, best, color=BLUE, **beside)
    panels[2].text(1, 1.15, "longtail stops drafting", color=ORANGE, **beside)
    write(figure, path)


FIGURES: Mapping[str, Callable[[Path], None]] = {
    "tail.svg": tail,
    "rollout.svg": rollout,
    "spot-training.svg": spot_training,
    "cold-start.svg": cold_start,
    "keyed-noise.svg": keyed_noise,
    "coupled-drafts.svg": coupled_drafts,
    "draft-budget.svg": draft_budget,
}


def main(words: Sequence[str]) -> None:
    """Draw all pictures into a folder."""
    folder = Path(words[0]) if words else IMAGES
    for name, draw in FIGURES.items():
        draw(folder / name)
        print(folder / name)


if __name__ == "__main__":
    main(sys.argv[1:])
