"""A rollout by several workers, in simulated time: who does what when, and who is waited for."""

from dataclasses import replace

import pytest

from longtail.cluster.group import WorkerGroup
from longtail.cluster.records import Progress
from longtail.cluster.workers.states import Span, State
from longtail.cluster.workers.worker_pool import STOP_S
from longtail.run.step_metrics import reused_share
from longtail.system.interrupt import Interrupted
from support.fake_worker import SpotScript, text
from support.scripted_pool import ScriptedPool, batch, begun, requests

TAIL = requests(100, 10, 50)
"""Shards of three workers: ten seconds, one, five."""
STEP_S = 0.5


def spans(group: WorkerGroup, *states: State) -> list[Span]:
    return [span for span in group.drain_timeline().spans if span.state in states]


def texts(rolled) -> list[tuple[int, ...]]:
    return [each.tokens for each in rolled.completions]


def test_idle_workers_train_while_others_generate_and_only_then():
    pool = ScriptedPool(3)
    group = begun(pool)
    rolled = group.rollout(1, TAIL)
    both = spans(group, State.SPOT, State.GENERATING)
    trained = [span for span in both if span.state is State.SPOT]
    assert [(span.worker, round(span.seconds)) for span in trained] == [(1, 9), (2, 5)]
    last = max(span.end_s for span in both if span.state is State.GENERATING)
    assert all(span.begin_s < last for span in trained)
    assert rolled.seconds == pytest.approx(10.0)
    assert group.workers(State.IDLE) == [0, 1, 2]


def test_the_reused_share_is_counted_in_tokens_over_all_workers():
    spot, *_ = begun(ScriptedPool(3)).rollout(1, TAIL).spots
    few, many = (replace(spot, num_tokens=n, num_reused=m) for n, m in ((100, 0), (300, 300)))
    none = replace(spot, num_tokens=0, num_reused=0)
    assert reused_share([few, many, none]) == 0.75
    assert reused_share([]) == reused_share([none]) == 0.0


def test_no_worker_trains_on_texts_of_an_evaluation():
    pool = ScriptedPool(2)
    group = begun(pool)
    assert texts(group.rollout(1, TAIL, trains=False)) == [text(each) for each in TAIL]
    assert not pool.starts("train_drafter")


def test_without_a_drafter_nothing_is_trained_or_saved():
    pool = ScriptedPool(2, has_drafter=False)
    group = begun(pool)
    assert texts(group.rollout(1, TAIL)) == [text(each) for each in TAIL]
    group.offer_drafter()
    assert not pool.starts("train_drafter")
    assert not {name for _, name in pool.answered} & {"sequences", "add_sequences"}
    assert (group.drafter, group.drain_decisions(), group.drafter_state()) == (None, [], None)


def test_a_spot_worker_that_does_not_stop_is_replaced_without_delay():
    pool = ScriptedPool(3, spot_scripts=lambda worker, nth: SpotScript(stop_s=float("inf")))
    group = begun(pool)
    group.rollout(1, TAIL)
    assert group.drain_timeline().metrics()["cluster/spot_stop_latency_s"] < STOP_S + 3 * STEP_S
    assert pool.births == [0, 1, 1]
    assert all("did not stop within 15 s" in said for said in pool.log_lines)
    assert texts(group.rollout(2, TAIL)) == [text(each) for each in TAIL]


def test_an_interrupted_rollout_leaves_all_workers_idle_and_able_to_save(tmp_path):
    interrupts = iter([False] * 20 + [True] + [False] * 1000)

    def interrupt(progress: Progress) -> None:
        if next(interrupts):
            raise Interrupted

    pool = ScriptedPool(3)
    group = begun(pool, on_progress=interrupt)
    group.learn([batch(1)])
    with pytest.raises(Interrupted):
        group.rollout(1, TAIL)
    assert group.workers(State.GENERATING, State.SPOT)
    group.abandon()
    assert group.workers(State.IDLE) == [0, 1, 2]
    group.save_policy(tmp_path / "policy")
    assert (tmp_path / "policy").read_text() == "(1,)"
    assert group.learner_state().numbers == {"version": 1}
    assert texts(group.rollout(1, TAIL)) == [text(each) for each in TAIL]
    assert pool.births == [0, 0, 0]
