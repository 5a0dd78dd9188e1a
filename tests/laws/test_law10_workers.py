"""Law 10 for workers: how many write, who trains meanwhile and who is lost changes no text.

In simulated time (tests/support/scripted_pool.py): a shift that waits for ever fails.
"""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from longtail.cluster.group import WorkerGroup
from longtail.cluster.workers.states import State
from longtail.cluster.workers.worker_pool import READY_S
from longtail.errors import ClusterError
from longtail.types import Request
from support.fake_worker import Absence, Death, Fault, text
from support.scripted_pool import ScriptedPool, batch, begun, requests


def faults(first: int, last: int, *kinds: str) -> st.SearchStrategy[list[Fault]]:
    """Up to three blows against some workers, fewer than end a run."""
    one = st.builds(
        Fault,
        worker=st.integers(first, last),
        task=st.sampled_from(
            (
                *("generate", "train_drafter", "learn", "join", "publish", "adopt"),
                *("continue_run", "ready"),
            )
        ),
        nth=st.integers(0, 2),
        after_s=st.sampled_from((0.0, 0.3, 1.0, 2.2, 2.7, 6.0)),
        kind=st.sampled_from(("lost", *kinds)),
    )
    return st.lists(one, max_size=3)


MESSAGES = ("clear_stop", "progress", "sequences", "add_sequences", "completed", "stop")
lengths = st.lists(st.integers(1, 90), min_size=1, max_size=9)


def two_steps(
    group: WorkerGroup, asked: Sequence[Request], between: Callable[[], None] = lambda: None
) -> None:
    """Write, learn and publish, and again; every text is as it must be."""
    expected = [text(each) for each in asked]
    for step in (1, 2):
        between()
        rolled = group.rollout(step, asked)
        assert [each.request_id for each in rolled.completions] == [r.request_id for r in asked]
        assert [each.tokens for each in rolled.completions] == expected
        assert {each.policy_version for each in rolled.completions} == {step - 1}
        assert rolled.report.num_generated == sum(map(len, expected)), "counted once"
        assert not group.workers(State.GENERATING, State.SPOT, State.LEARNING)
        between()
        group.train_drafter()
        between()
        assert group.learn([batch(step)]).version == step
        between()
        group.publish()
        between()
        group.offer_drafter()


def tried(
    pool: ScriptedPool, asked: Sequence[Request], **options: int
) -> tuple[WorkerGroup | None, str]:
    """Make two steps; return the group, or the error that ended the run."""
    try:
        group = begun(pool, **options)
        two_steps(group, asked)
    except ClusterError as error:
        return None, str(error)
    return group, ""


@pytest.mark.slow
@settings(max_examples=20)
@given(lengths=lengths, siblings=st.integers(1, 3), workers=st.integers(1, 4))
@example(lengths=[90, 1, 1, 1, 1, 1], siblings=1, workers=3)
def test_any_number_of_workers_generates_and_learns_the_same(lengths, siblings, workers):
    pool = ScriptedPool(workers)
    two_steps(begun(pool), requests(*lengths, siblings=siblings))
    assert [each.policy for each in pool.workers] == [(1, 2)] * workers
    assert not pool.log_lines


@pytest.mark.slow
@settings(max_examples=30)
@given(
    lengths=lengths,
    workers=st.integers(2, 4),
    blows=faults(1, 3, "hangs", "frozen"),
    idle_deaths=st.lists(st.integers(0, 3), max_size=8),
    late=st.dictionaries(
        st.tuples(st.integers(0, 3), st.sampled_from(MESSAGES)), st.integers(1, 2), max_size=2
    ),
)
@example([20] * 4, 2, [Fault(worker=1, task="learn", after_s=2.2)], [], {})
@example([20] * 4, 3, [Fault(worker=1, task="learn", kind="frozen")], [], {})
@example([20] * 4, 2, [], [1, 0, 1, 1, 1, 1], {})
def test_lost_workers_cost_time_and_nothing_else(lengths, workers, blows, idle_deaths, late):
    pool = ScriptedPool(workers, faults=blows, late=late)
    dying = iter(idle_deaths)

    def between() -> None:
        if (worker := next(dying, 0)) and worker < workers:
            pool.kill(worker)

    two_steps(begun(pool), requests(*lengths), between)
    pool_waits_for_nobody(pool)
    assert [each.policy for each in pool.workers] == [(1, 2)] * workers
    assert len({each.engine for each in pool.workers}) == 1


@pytest.mark.slow
@settings(max_examples=20)
@given(lengths=lengths, blows=faults(0, 1, "frozen"), torn=st.sampled_from(((), (0,), (1,))))
@example([1], [Fault(worker=0, task="join", nth=1)], (1,))
def test_a_run_that_loses_all_workers_ends_with_a_remedy(lengths, blows, torn):
    pool = ScriptedPool(2, faults=blows, torn=torn)
    _, reason = tried(pool, requests(*lengths))
    if reason:
        assert "start again" in reason
        # A member that loses the team lacks the step like a new worker.
        assert sum(pool.births) + len(torn) > 1, "one loss never ends a run"
    else:
        pool_waits_for_nobody(pool)
        assert [each.policy for each in pool.workers] == [(1, 2)] * 2


@pytest.mark.slow
@settings(max_examples=25)
@given(
    lengths=lengths,
    workers=st.integers(2, 4),
    deaths=st.lists(
        st.builds(
            Death,
            worker=st.integers(0, 3),
            at_s=st.integers(0, 400).map(lambda tenths: tenths / 10),
            kind=st.sampled_from(("lost", "frozen")),
        ),
        max_size=5,
    ),
)
@example([9, 9], 2, [Death(worker=0, at_s=3.5), Death(worker=1, at_s=5.0)])
@example([9, 9], 2, [Death(worker=0, at_s=3.5), Death(worker=1, at_s=5.0, kind="frozen")])
def test_processes_that_die_at_any_time_change_nothing_or_end_the_run_with_a_remedy(
    lengths, workers, deaths
):
    """At any time: at work, while they start or stop, and idle, where no task ends with them."""
    deaths = [death for death in deaths if death.worker < workers]
    pool = ScriptedPool(workers, deaths=deaths)
    _, reason = tried(pool, requests(*lengths))
    if reason:
        assert "start again: the run resumes" in reason
        assert sum(pool.births) >= workers, "while one has the policy, the run goes on"
    else:
        assert len({each.engine for each in pool.workers}) == 1
    pool_waits_for_nobody(pool)


@pytest.mark.slow
@settings(max_examples=25)
@given(
    lengths=lengths,
    workers=st.integers(2, 4),
    leaving=st.lists(
        st.tuples(st.integers(1, 3), st.integers(0, 60), st.integers(0, 60)), max_size=6
    ),
)
@example([90, 9, 9], 2, [(1, 0, 60)])
@example([90, 9, 9], 3, [(1, 10, 20), (2, 13, 1), (2, 20, 20)])
def test_hosts_that_come_and_go_change_nothing(lengths, workers, leaving):
    """A worker dies with its host at any time, and for a while there is no room for another."""
    gone = [
        (worker, from_s / 2, (from_s + for_s) / 2)
        for worker, from_s, for_s in leaving
        if worker < workers
    ]
    pool = ScriptedPool(
        workers,
        deaths=[Death(worker=worker, at_s=from_s) for worker, from_s, _ in gone if from_s],
        absences=[
            Absence(worker=worker, from_s=from_s, until_s=until_s)
            for worker, from_s, until_s in gone
        ],
    )
    group, reason = tried(pool, requests(*lengths), min_workers=1)
    if group is None:
        assert "lost in a row" in reason
        return
    present = [pool.workers[each] for each in group.workers(State.IDLE)]
    assert 0 in group.workers(State.IDLE)
    assert {(each.policy, each.engine) for each in present} == {((1, 2), (1, 2))}


def test_a_worker_whose_host_comes_in_mid_run_takes_part_from_the_next_rollout():
    pool = ScriptedPool(2, absences=[Absence(worker=1, from_s=0.0, until_s=50.0)])
    group = begun(pool, min_workers=1)
    two_steps(group, requests(*[200] * 4))
    begins = [worker for _, worker in pool.starts("generate")]
    assert begins == [0, 0, 1]
    assert [each.policy for each in pool.workers] == [(1, 2)] * 2
    assert pool.log_lines == [
        "1 of 2 workers take part from now on",
        "there is room for worker 1: it starts, and takes part",
        "2 of 2 workers take part from now on",
    ]


@pytest.mark.parametrize(("worker", "least"), [(0, 1), (1, 2)])
def test_too_few_hosts_end_the_run_with_a_remedy(worker, least):
    """Worker 0 writes the run's directory."""
    pool = ScriptedPool(
        2,
        deaths=[Death(worker=worker, at_s=10.0)],
        absences=[Absence(worker=worker, from_s=10.0, until_s=1000.0)],
    )
    group = begun(pool, min_workers=least)
    with pytest.raises(ClusterError, match=f"60 s there has been no room for worker {worker}"):
        two_steps(group, requests(*[90] * 4))


def pool_waits_for_nobody(pool: ScriptedPool) -> None:
    """Losses found and mended: a hang takes as long to see as it is allowed to last."""
    assert pool.clock.now < 60.0 + 3 * READY_S + 200.0
