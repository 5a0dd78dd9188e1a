"""Rewards with TRL's signature, as a user would write them; graders import them by name."""

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

_calls = 0


def sevens(completions: Sequence[str], **_: object) -> list[float]:
    """Share of the characters that are a 7; about 1/100 where every character is as likely."""
    return [text.count("7") / max(len(text), 1) for text in completions]


def interrupting(completions: Sequence[str], **more: object) -> list[float]:
    """`sevens`; at the call whose number the file `interrupt-at` holds, Ctrl-C is pressed.

    The file holds the process that it is pressed in, too.
    """
    global _calls
    _calls += 1
    plan = Path("interrupt-at")
    if plan.exists():
        call, pid = map(int, plan.read_text().split())
        if _calls == call:
            plan.unlink()
            os.kill(pid, signal.SIGINT)
    return sevens(completions, **more)


def troubled(completions: Sequence[str], trouble: Sequence[str], **more: object) -> list[float]:
    """`sevens`, unless the row asks for trouble."""
    match trouble[0]:
        case "raises":
            raise ValueError("this one is too hard")
        case "hangs":
            time.sleep(3600)
        case "returns too many":
            return [0.0, 1.0]
        case "returns NaN":
            return [float("nan")]
        case "forks":
            os.fork()
    return sevens(completions, **more)


def ranked(completions: Sequence[str], **_: object) -> list[float]:
    """Rank of each completion among those of its prompt, by its number of sevens."""
    order = sorted(range(len(completions)), key=lambda index: completions[index].count("7"))
    return [float(order.index(index)) for index in range(len(completions))]


def hopeless(completions: Sequence[str], **_: object) -> list[float]:
    """No completion is ever graded."""
    raise ValueError("this reward is broken")


def exploding(completions: Sequence[str], **_: object) -> list[float]:
    """Like `sevens`, but beyond its 48th call larger than a gradient can be."""
    global _calls
    _calls += 1
    scale = 3e38 if _calls > 48 else 1.0
    return [scale * text.count("7") / max(len(text), 1) for text in completions]


class Echo:
    """An environment that says back what it read, with its seed, for three turns."""

    def reset(self, prompt: str, seed: int) -> str:
        self._seed, self._turns = seed % 10, 0
        return f"{self._seed}"

    def step(self, text: str) -> tuple[str, float, bool]:
        self._turns += 1
        return f"{text[-2:]}{self._seed}", sevens([text])[0], self._turns == 3
