"""The task of the toy: count the steps of a hailstone sequence, in writing.

An even number is followed by its half, an odd one by three times it plus one; how many steps lead
to 1? The number of steps cannot be predicted from the start (26 takes 10, 27 takes 111), so answers
are as heavy-tailed as real reasoning, and each can be checked. It owns problems and worked
solutions; pure Python, no model, no tokenizer.

As in the training data of a base model, solutions are of two kinds: careful ones count to the end,
hasty ones stop early and guess. Supervised learning reproduces both, with their frequencies;
reinforcement learning can improve the choice.
"""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice, pairwise
from random import Random
from statistics import NormalDist
from typing import Any, Literal

Split = Literal["train", "heldout"]

MAX_START, MAX_VALUE, MAX_STEPS = 999, 9999, 118
"""Largest start, largest number of a sequence, and largest number of steps."""
_LENGTHS = NormalDist(math.log(11), 1.4)
"""Distribution of the logarithm of the number of steps."""
_LONG = 96
"""Least number of steps of the starts that replace draws beyond MAX_STEPS."""
_STRATA = 16
"""Number of quantile ranges of the distribution; consecutive problems draw one length from each."""
_HELDOUT_SHARE = 4
"""Ratio of all starts to those held out."""
_CAREFUL_SHARE = 0.4
_DRILL_SHARE = 0.5

QUESTIONS = (
    "How many steps does {} take to reach 1?",
    "How many steps from {} to 1?",
    "Start at {}. How many steps until 1?",
    "Count the steps of {} until 1.",
)
_DRILL = "What comes after {}?"
_CAREFUL = ("Let me go step by step.", "I will count each step.", "Let me be careful.")
_HASTY = ("Let me be quick.", "A short try.", "This looks easy.")
_OPENERS = ("", "", " now", " next", " then", " ok", " well")
_STATED = (" {n} is {parity}", " {n} {parity}", " the {parity} {n}")
_ODD = (", triple plus one {m}", ", times three plus one {m}", ", it goes up to {m}")
_EVEN = (", half is {m}", ", by two is {m}", ", it goes down to {m}")
_CHECK = " (check {m})"
_TERSE = (" {parity}, {m}", " {parity} so {m}", " {parity} to {m}")
_ARRIVED = ("{} steps.", "{} in all.", "{} and done.")
_TIRED = ("I am tired, I guess {}.", "And so on, maybe {}.", "That is enough, {}.")
_ANSWERS = ("The answer is {}.", "It takes {}.", "Answer: {}.")
PHRASES = (
    *QUESTIONS,
    _DRILL,
    *_CAREFUL,
    *_HASTY,
    *_OPENERS,
    *_STATED,
    *_ODD,
    *_EVEN,
    _CHECK,
    *_TERSE,
    *_ARRIVED,
    *_TIRED,
    *_ANSWERS,
    " odd even",
)
"""All texts of problems and solutions, except for numbers."""


def walk_step(number: int) -> int:
    """Return the number after a number: its half, or three times it plus one."""
    return 3 * number + 1 if number % 2 else number // 2


def walk(start: int) -> tuple[int, ...]:
    """Return the sequence from `start` to 1, both included.

    Example: walk(6) == (6, 3, 10, 5, 16, 8, 4, 2, 1), which is 8 steps.
    """
    numbers = [start]
    while numbers[-1] != 1:
        numbers.append(walk_step(numbers[-1]))
    return tuple(numbers)


def split_of(start: int) -> Split:
    """Return the split of a start, by a hash of the start alone."""
    digest = hashlib.blake2b(f"hailstone/{start}".encode(), digest_size=4).digest()
    return "train" if int.from_bytes(digest, "little") % _HELDOUT_SHARE else "heldout"


@cache
def _starts(split: Split) -> tuple[tuple[int, int], ...]:
    """Return (steps, start) of every start of a split, sorted."""
    walks = (walk(start) for start in range(2, MAX_START + 1) if split_of(start) == split)
    return tuple(
        sorted(
            (len(numbers) - 1, numbers[0])
            for numbers in walks
            if max(numbers) <= MAX_VALUE and len(numbers) - 1 <= MAX_STEPS
        )
    )


def _draw_starts(split: Split, rng: Random) -> Iterator[int]:
    """Draw starts without end, with log-normal, stratified numbers of steps."""
    starts = _starts(split)
    while True:
        for stratum in rng.sample(range(_STRATA), _STRATA):
            wanted = math.exp(_LENGTHS.inv_cdf((stratum + max(rng.random(), 1e-9)) / _STRATA))
            if wanted > MAX_STEPS:
                wanted = rng.uniform(_LONG, MAX_STEPS)
            distance = min(abs(steps - wanted) for steps, _ in starts)
            yield rng.choice([n for steps, n in starts if abs(steps - wanted) == distance])


def problems(size: int, seed: int, split: Split) -> list[dict[str, Any]]:
    """Draw problems; the splits share no start.

    Lengths are stratified: every 16 consecutive rows span the whole distribution, so batches of
    rows in this order are similar.

    Example row: {"prompt": [{"role": "user", "content": "How many steps from 6 to 1?"}],
                  "answer": "8", "problem_id": "hailstone/6/1/0"}
    `problem_id` contains start, wording and occurrence, so it is unique within a draw.
    """
    rng = Random(f"problems/{split}/{seed}")
    seen: dict[tuple[int, int], int] = {}
    rows: list[dict[str, Any]] = []
    for start in islice(_draw_starts(split, rng), size):
        wording = rng.randrange(len(QUESTIONS))
        occurrence = seen.get((start, wording), 0)
        seen[start, wording] = occurrence + 1
        rows.append(
            {
                "prompt": [{"role": "user", "content": QUESTIONS[wording].format(start)}],
                "answer": str(len(walk(start)) - 1),
                "problem_id": f"hailstone/{start}/{wording}/{occurrence}",
            }
        )
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """Style of a solution; drawn once per solution, so its lines are similar.

    Example: Manner(careful=True, talkative=0.8, tiring=0.0) writes long lines, to the end.
    """

    careful: bool
    talkative: float
    """Probability that a line is written in full."""
    tiring: float
    """Probability, after each step, of guessing the answer."""


def draw_manner(rng: Random) -> Manner:
    """Draw a style; two solutions of five are careful."""
    careful = rng.random() < _CAREFUL_SHARE
    return Manner(
        careful=careful,
        talkative=rng.choice((0.1, 0.5, 0.9)),
        tiring=0.002 if careful else rng.choice((0.15, 0.3)),
    )


def _line(number: int, manner: Manner, rng: Random) -> str:
    """Return the text of one step, without its count."""
    if rng.random() >= manner.talkative:
        line = rng.choice(_TERSE)
    else:
        operation = rng.choice(_ODD if number % 2 else _EVEN)
        check = _CHECK if rng.random() < 0.08 else ""
        line = rng.choice(_OPENERS) + rng.choice(_STATED) + operation + check
    return line.format(n=number, m=walk_step(number), parity="odd" if number % 2 else "even")


def solution(start: int, manner: Manner, rng: Random) -> str:
    """Return a worked solution; it may end early in a guess, which is mostly wrong."""
    numbers = walk(start)
    answer = len(numbers) - 1
    lines = [
        "<think>",
        rng.choice(_CAREFUL if manner.careful else _HASTY),
        f"0: {start}",
    ]
    for count, (number, after) in enumerate(pairwise(numbers), 1):
        lines.append(f"{count}:{_line(number, manner, rng)}")
        if after != 1 and rng.random() < manner.tiring:
            answer = count + rng.randint(2, 20)
            lines.append(rng.choice(_TIRED).format(answer))
            break
    else:
        lines.append(rng.choice(_ARRIVED).format(answer))
    return "\n".join([*lines, "</think>", rng.choice(_ANSWERS).format(answer)])


def _drill(rng: Random) -> dict[str, Any]:
    """Return a problem of one step from any number, with small numbers more likely."""
    after = MAX_VALUE + 1
    while after > MAX_VALUE:
        number = int(math.exp(rng.uniform(math.log(2), math.log(MAX_VALUE + 1))))
        after = walk_step(number)
    text = f"0: {number}\n1:{_line(number, draw_manner(rng), rng)}"
    return {
        "prompt": [{"role": "user", "content": _DRILL.format(number)}],
        "completion": f"<think>\n{text}\n</think>\n{after}.",
    }


def examples(size: int, seed: int) -> list[dict[str, Any]]:
    """Draw problems of the train split with worked solutions of mixed care, and single-step drills.

    Rows hold `prompt` (chat messages) and `completion` (text, no end-of-text token).
    """
    rng = Random(f"examples/{seed}")
    rows = []
    for problem in problems(size, seed, "train"):
        if rng.random() < _DRILL_SHARE:
            rows.append(_drill(rng))
            continue
        start = int(problem["problem_id"].split("/")[1])
        text = solution(start, draw_manner(rng), rng)
        rows.append({"prompt": problem["prompt"], "completion": text})
    return rows
