"""One run that is struck on purpose, and what came of it."""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from chaos.diary import ANEW, DEAD, DRIVER, IDLE, STARTING, named
from chaos.plan import Strike
from chaos.reference import Milestone, Reference, differing, milestones, weights_of
from chaos.sitting import Failure, Sitting, leftovers

_SENTENCE = "start again: the run resumes from its newest checkpoint"
"""With it a run may end by itself, once too much of it is lost."""
_UNKNOWN_S = 0.3
"""Length of an activity that the undisturbed run never showed."""
_SLOWER = 10.0
_EACH_KILL_S = 90.0
"""A run may take this multiple of the undisturbed run's seconds, plus this many for each kill."""


@dataclass
class Kill:
    """A kill that was made, and what it cost.

    Example: Kill(who=1, activity="learning", at=812.5, recovery="in place", lost_s=6.2)
    """

    who: int
    activity: str
    """Activity of the victim when it was killed."""
    at: float
    recovery: str = ""
    """`in place` where a successor took over, `by resuming` where the run was started again before
    that; empty of a failed run."""
    lost_s: float = 0.0

    @property
    def state(self) -> str:
        """The activity, told apart by whose it is."""
        return named(self.who, self.activity)


@dataclass
class Outcome:
    """Result of a trial; `failure` is empty if it wrote what the undisturbed one did."""

    kills: list[Kill] = field(default_factory=list)
    missed: int = 0
    """Strikes whose moment never came."""
    sentences: list[str] = field(default_factory=list)
    """With which the run ended by itself."""
    failure: str = ""
    num_rollouts: int = 0
    num_different: int = 0
    seconds: float = 0.0


class Trial:
    """A run in as many sittings as it takes. All its files are under `place`."""

    def __init__(
        self,
        words: Sequence[str],
        strikes: Sequence[Strike],
        reference: Reference,
        place: Path,
        *,
        patience_s: float,
        resumed: Sequence[str] = (),
    ) -> None:
        """Plan a trial; `resumed` are words of all sittings but the first."""
        self._words, self._resumed = [*words, f"--run.dir={place / 'run'}"], resumed
        self._strikes, self._reference, self._place = list(strikes), reference, place
        self._patience_s = patience_s
        self._most_s = _SLOWER * reference.seconds + _EACH_KILL_S * len(strikes) + patience_s
        self._most_sittings = len(strikes) + 2
        self._began = 0.0
        self._reached: list[tuple[float, Milestone]] = []
        self._outcome = Outcome()

    def run(self) -> Outcome:
        """Sit until the run is finished, then compare. The outcome names what failed."""
        outcome, self._began = self._outcome, time.monotonic()
        try:
            try:
                self._finish()
            finally:
                outcome.seconds = time.monotonic() - self._began
                left = leftovers(self._place)
            self._compare()
            if left:
                raise Failure(f"processes outlived the run: {left}")
        except Failure as failure:
            outcome.failure = str(failure)
            for kill in outcome.kills:
                kill.recovery = ""
        else:
            share_lost_seconds(outcome, self._lateness())
        return outcome

    def _finish(self) -> None:
        for number in range(self._most_sittings):
            words = [*self._words, *(self._resumed if number else ())]
            place = self._place / f"sitting-{number}"
            sitting = Sitting(words, place, patience_s=self._patience_s)
            try:
                is_finished = self._sit(sitting)
            except Failure:
                sitting.show_stacks()
                raise
            finally:
                self._reached += milestones(sitting)
                sitting.end()
            if "Traceback (most recent" in sitting.log.read_text(errors="replace"):
                raise Failure(f"sitting {number} shows a traceback: {sitting.last_words}")
            if is_finished:
                self._outcome.missed += len(self._strikes)
                return
        raise Failure(f"the run is not finished after {self._most_sittings} sittings")

    def _sit(self, sitting: Sitting) -> bool:
        """Strike one sitting until it ends; return whether the run is finished."""
        kills = self._outcome.kills
        first, armed_at, victim = len(kills), sitting.began, None
        while self._strikes and victim != DRIVER:
            entered = self._await(sitting, self._strikes[0], armed_at)
            if entered is None:
                break
            armed_at = time.monotonic()
            victim = self._kill(sitting, self._strikes.pop(0), entered)
        if victim != DRIVER:
            sitting.wait_until(self._is_over_in_time)
        for kill in kills[first:]:
            kill.recovery = _recovery(sitting, kill)
        if victim == DRIVER or sitting.code == 0:
            return victim != DRIVER
        if _SENTENCE not in sitting.last_words or len(kills) == first:
            raise Failure(f"the run ended with code {sitting.code}: {sitting.last_words}")
        self._outcome.sentences.append(sitting.last_words)
        return False

    def _await(self, sitting: Sitting, strike: Strike, armed_at: float) -> int | None:
        """Wait for the strike's moment; return who entered, None if the run ended before."""
        seen: set[tuple[float, int]] = set()

        def is_entered() -> bool:
            self._is_over_in_time()
            seen.update(_entered(sitting, strike, armed_at))
            return len(seen) > strike.skips

        if not sitting.wait_until(is_entered):
            return None
        who, due = max(seen)[1], time.monotonic() + self._wait_s(strike)
        return who if sitting.wait_until(lambda: time.monotonic() >= due) else None

    def _kill(self, sitting: Sitting, strike: Strike, entered: int) -> int | None:
        """Kill the victim, if there is one; return who it was."""
        victim = _victim(sitting, strike, entered)
        if victim is None:
            self._outcome.missed += 1
            return None
        kill = Kill(victim, sitting.diary.actors[victim].activity, time.monotonic())
        if not sitting.strike(victim):
            self._outcome.missed += 1
            return None
        self._outcome.kills.append(kill)
        return victim

    def _wait_s(self, strike: Strike) -> float:
        """Return how long after the entry the strike comes."""
        activity = STARTING if strike.awaited == ANEW else strike.awaited
        name = named(DRIVER if strike.of_driver else 0, activity)
        lengths = self._reference.lengths.get(name, [_UNKNOWN_S])
        return strike.moment * lengths[int(strike.length * len(lengths))]

    def _is_over_in_time(self) -> bool:
        """Return False; raise Failure if the whole takes too long."""
        if (seconds := time.monotonic() - self._began) > self._most_s:
            raise Failure(f"the run is not finished after {seconds:.0f} s")
        return False

    def _compare(self) -> None:
        """Compare with the undisturbed run. Raises Failure."""
        run, outcome = self._place / "run", self._outcome
        different = differing(run, self._reference)
        outcome.num_rollouts = len(self._reference.rollouts)
        outcome.num_different = len(different)
        if different:
            raise Failure(
                f"{len(different)} of {outcome.num_rollouts} rollouts differ, the first in step "
                f"{different[0][0]}"
            )
        weights = self._reference.weights
        if weights is not None and weights_of(run) != weights:
            raise Failure("the weights that the run ended with differ")

    def _lateness(self) -> list[tuple[float, float]]:
        """Return by how many seconds the run was late, at the end of each phase and of all."""
        late = [
            (at, at - self._began - self._reference.milestones[key])
            for at, key in self._reached
            if key in self._reference.milestones
        ]
        end = self._began + self._outcome.seconds
        return [*late, (end, self._outcome.seconds - self._reference.seconds)]


def _entered(sitting: Sitting, strike: Strike, armed_at: float) -> set[tuple[float, int]]:
    """Return who entered the awaited activity since the strike was armed, and when.

    An actor that is still starting counts, too. The process of a victim must be known.
    """
    actors = sitting.diary.actors
    return {
        (at, who)
        for at, who, activity in sitting.diary.entered
        if (who == DRIVER) == strike.of_driver
        and activity == strike.awaited
        and (at >= armed_at or activity == actors[who].activity in (STARTING, ANEW))
        and (actors[who].pid or strike.victim != "itself")
    }


def _victim(sitting: Sitting, strike: Strike, entered: int) -> int | None:
    """Return who is to be killed; None if there is no other worker."""
    if strike.victim == "the driver":
        return DRIVER
    if strike.victim == "itself":
        return entered
    others = [
        who
        for who, actor in sitting.diary.workers.items()
        if who != entered and actor.pid and actor.activity != DEAD
    ]
    return random.Random(strike.moment).choice(others) if others else None


def _recovery(sitting: Sitting, kill: Kill) -> str:
    """Return whether the victim was replaced while the run went on."""
    states = [
        entry["state"]
        for entry in sitting.diary.entries
        if entry["who"] == kill.who and entry["at"] > kill.at and "state" in entry
    ]
    is_replaced = DEAD in states and IDLE in states[states.index(DEAD) :]
    is_worker = kill.who != DRIVER
    return "in place" if is_worker and (is_replaced or sitting.code == 0) else "by resuming"


def share_lost_seconds(outcome: Outcome, lateness: Sequence[tuple[float, float]]) -> None:
    """Give each kill the lateness that came up between it and the next one.

    Kills between which no phase ended share it. Example: late by 0.1 s, killed twice, then late by
    8.1 s: 4 s each.
    """
    before, group = 0.0, list[Kill]()
    events = sorted([*((kill.at, kill) for kill in outcome.kills), *lateness], key=lambda e: e[0])
    late = 0.0
    is_new = False
    for _, event in events:
        if isinstance(event, Kill):
            if is_new:
                _divide(late - before, group)
                before, group, is_new = late, [], False
            group.append(event)
        else:
            late, is_new = event, True
    _divide(late - before, group)


def _divide(seconds: float, kills: Sequence[Kill]) -> None:
    for kill in kills:
        kill.lost_s = seconds / len(kills)
