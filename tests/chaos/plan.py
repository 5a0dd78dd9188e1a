"""Whom to kill when: strikes, dealt from a shuffled deck so that every state has its turn.

A plan follows from the seed and the number of the trial alone, so a trial can be made again; what
the machine does in the meantime cannot.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Literal

from chaos.diary import ANEW, IDLE, SETUP, STARTING

Victim = Literal["itself", "another worker", "the driver"]

_COMMON = (IDLE, "generating", "learning", "publishing weights", "rollout", "grading")
"""Activities of every step: some are let pass first."""
_MOST_SKIPS = 6
_ORDER = {STARTING: 0, SETUP: 1, "meeting the team": 2, "adopting a drafter": 4, "finishing": 5}
"""Activities that come only at the beginning, seldom, or only at the end; all others are 3."""


@dataclass(frozen=True, slots=True)
class Strike:
    """One kill: an actor enters an activity, and a random part of its usual length later it comes.

    Example: Strike(awaited="learning", moment=0.4)
    """

    awaited: str
    of_driver: bool = False
    """Whether the driver's activity is meant, or a worker's."""
    victim: Victim = "itself"
    """Victim: the actor that entered the activity, or another one meanwhile."""
    skips: int = 0
    """Entries into the activity that are let pass first."""
    length: float = 0.5
    """Quantile of the lengths seen in the undisturbed run counts: 0 the shortest, 1 the longest."""
    moment: float = 0.5
    """Part of that length to wait."""


Blow = tuple[Strike, ...]
"""Strikes that belong together, in their order."""

_FELLED = Strike("generating")
"""Makes way for a successor."""
BLOWS: tuple[Blow, ...] = (
    *(
        (Strike(activity),)
        for activity in (
            *(STARTING, IDLE, IDLE, SETUP, "generating", "spot training", "learning"),
            *("meeting the team", "publishing weights", "adopting a drafter", "checkpointing"),
        )
    ),
    (Strike("grading", of_driver=True, victim="another worker"),),
    (_FELLED, Strike(ANEW)),
    (_FELLED, Strike(ANEW, victim="another worker")),
    (Strike(IDLE), Strike(ANEW, victim="another worker")),
    (Strike("learning"), Strike(ANEW, victim="another worker")),
    *(
        (Strike(phase, of_driver=True),)
        for phase in (
            *(STARTING, "rollout", "grading", "learning", "publishing", "checkpointing"),
            "finishing",
        )
    ),
    (_FELLED, Strike(ANEW, victim="the driver")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A trial: how the run is made, and its strikes in order."""

    number: int
    dtype: str
    workers: int
    trains: str
    """`spot.train`: without spot training workers are idle for long."""
    checkpoint_every: int
    strikes: tuple[Strike, ...]


def plans(seed: int, dtypes: Sequence[str], crews: Sequence[int], *, blows: int) -> Iterator[Plan]:
    """Deal plans for ever, `blows` a trial; settings take turns, so that all meet all."""
    deck = _dealt(seed)
    for number in count():
        rng = random.Random(f"{seed}/{number}")
        strikes = [
            _drawn(strike, rng) for blow in _ordered(list(islice(deck, blows))) for strike in blow
        ]
        awaited = {strike.awaited for strike in strikes}
        has_idle = IDLE in awaited and not awaited & {"spot training", "adopting a drafter"}
        yield Plan(
            number=number,
            dtype=dtypes[number % len(dtypes)],
            workers=crews[number // len(dtypes) % len(crews)],
            trains="never" if has_idle and rng.random() < 0.75 else "spot",
            checkpoint_every=rng.choice((1, 2)),
            strikes=tuple(strikes),
        )


def _dealt(seed: int) -> Iterator[Blow]:
    """Deal all blows in a random order, again and again."""
    for number in count():
        deck = list(BLOWS)
        random.Random(f"{seed}/deck {number}").shuffle(deck)
        yield from deck


def _ordered(blows: list[Blow]) -> list[Blow]:
    """Put first what is only at the beginning, and last what is only at the end."""
    return sorted(blows, key=lambda blow: _ORDER.get(blow[0].awaited, 3))


def _drawn(strike: Strike, rng: random.Random) -> Strike:
    """Draw the moment."""
    return replace(
        strike,
        skips=rng.randrange(_MOST_SKIPS + 1) if strike.awaited in _COMMON else 0,
        length=rng.random(),
        moment=rng.random(),
    )
