"""The guard: who is paused, for how long, and what does not count."""

from longtail.speculation.strategy import Strategy
from longtail.tuner.cost import CostModel, TimeCurve
from longtail.tuner.guard import Guard
from longtail.tuner.records import Batch, DraftTiming, Outcome, Plan

PLAIN_S = 1e-3
"""Seconds of a plain step of any size, in a cost model without corrections."""
WINDOW, PAUSE = 32, 64


def make_guard() -> Guard:
    return Guard(CostModel(TimeCurve((1, 64), (PLAIN_S, PLAIN_S)), pair_s=0.0, node_pair_s=0.0))


def step(took: float, *, accepted: int = 0, drafted: bool = True) -> Outcome:
    """A step of four requests that took the time of `took` plain steps."""
    timing = DraftTiming(drafter=0, num_requests=4, levels=2, rows=8, seconds=0.1 * took * PLAIN_S)
    return Outcome(
        batch=Batch(num_draftable=4, num_sampled=4, num_tokens=4, num_pairs=4, room=60),
        plan=Plan(strategy=Strategy(depth=2) if drafted else None),
        timings=(timing,) if drafted else (),
        num_drafts=4 if drafted else 0,
        num_nodes=8 if drafted else 0,
        num_accepted=accepted,
        verify_s=(0.9 if drafted else 1.0) * took * PLAIN_S,
    )


LOSING, WINNING, PLAIN = step(1.5, accepted=1), step(1.5, accepted=4), step(1.0, drafted=False)
"""1.25 plain steps' tokens in the time of 1.5; 2.0 in that of 1.5."""


def pause_length(guard: Guard) -> int:
    """Steps until drafting is allowed again."""
    count = 0
    while not guard.allows:
        assert not guard.learn(PLAIN)
        count += 1
    return count


def lose(guard: Guard) -> int:
    """Lose until paused; return the length of the pause."""
    while not guard.learn(LOSING):
        assert guard.allows
    return pause_length(guard)


def test_a_losing_window_pauses_with_a_reason():
    guard = make_guard()
    reasons = [guard.learn(LOSING) for _ in range(WINDOW)]
    assert reasons[:-1] == [""] * (WINDOW - 1)
    assert reasons[-1] == (
        "drafting gave 0.83x of plain decoding over 32 steps at 4 running: paused for 64 steps"
    )
    assert not guard.allows
    assert pause_length(guard) == PAUSE


def test_a_pause_after_a_pause_is_twice_as_long_up_to_a_limit():
    guard = make_guard()
    assert [lose(guard) for _ in range(8)] == [64, 128, 256, 512, 1024, 2048, 2048, 2048]


def test_a_winning_window_resets_the_next_pause():
    guard = make_guard()
    assert [lose(guard), lose(guard)] == [64, 128]
    for _ in range(WINDOW):
        assert not guard.learn(WINNING)
    assert lose(guard) == PAUSE


def test_a_window_begins_empty_after_a_pause():
    guard = make_guard()
    lose(guard)
    assert not any(guard.learn(LOSING) for _ in range(WINDOW - 1))
    assert guard.learn(LOSING)


def test_drafting_that_wins_or_all_but_breaks_even_goes_on():
    for outcome in (WINNING, step(1.02)):
        guard = make_guard()
        assert not any(guard.learn(outcome) for _ in range(10 * WINDOW))
    guard = make_guard()
    assert any(guard.learn(step(1.04)) for _ in range(WINDOW))


def test_a_winner_that_begins_to_lose_is_found_out_within_a_window():
    guard = make_guard()
    for _ in range(100):
        guard.learn(WINNING)
    reasons = [guard.learn(step(2.0)) for _ in range(WINDOW)]
    assert any(reasons)


def test_a_stall_counts_as_four_plain_steps_at_most():
    guard = make_guard()
    outcomes = [step(1000.0)] + [step(1.0, accepted=1)] * (WINDOW - 1)
    assert not any(guard.learn(outcome) for outcome in outcomes)
    guard = make_guard()
    outcomes = [step(3.9)] * WINDOW  # slow, but no stall: this is lost
    assert any(guard.learn(outcome) for outcome in outcomes)


def test_plain_steps_do_not_count():
    guard = make_guard()
    assert not any(guard.learn(step(50.0, drafted=False)) for _ in range(3 * WINDOW))
    for _ in range(WINDOW - 1):
        assert not guard.learn(PLAIN)
        assert not guard.learn(LOSING)
    assert guard.learn(LOSING)
