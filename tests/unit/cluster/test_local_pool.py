"""The pool of one: real machines in this process, no other needed."""

from collections.abc import Callable
from functools import partial

import pytest

from end_to_end.workshop import Workshop, build
from longtail.assembly.trainer import TrainerComponents, assemble
from longtail.assembly.worker import build_worker
from longtail.cluster.pool import LocalWorkerPool
from longtail.cluster.records import Progress
from longtail.cluster.states import State
from longtail.cluster.worker import Worker
from longtail.config.rl import load
from longtail.errors import ClusterError
from longtail.rl.data.requests import train_requests
from longtail.system.interrupt import Interrupted
from longtail.types import Request
from support.fake_worker import drafter


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return build(tmp_path_factory.mktemp("own"))


def _parts(
    workshop: Workshop, on_progress: Callable[[Progress], None]
) -> tuple[TrainerComponents, list[Request]]:
    config = load(None, workshop.words("run", "--speculation.drafter=history")[1:])
    parts = assemble(config, workshop.model, lambda rows: {}, on_progress=on_progress)
    parts.workers.publish()
    asked = train_requests(parts.source.take(2), samples=3, seed=0, sampling=parts.sampling)
    return parts, list(asked.requests)


@pytest.mark.slow
def test_one_worker_generates_all_completions_and_reports_progress(workshop):
    heard: list[Progress] = []
    parts, asked = _parts(workshop, heard.append)
    rolled = parts.workers.rollout(1, asked)
    assert [each.request_id for each in rolled.completions] == [r.request_id for r in asked]
    assert heard[-1].num_finished == 6
    assert heard[-1].num_generated == sum(len(each.tokens) for each in rolled.completions)
    assert rolled.report.num_generated == heard[-1].num_generated
    assert [(each.worker, each.kind) for each in rolled.logged(1, "training")] == [(0, "training")]
    assert rolled.costs is not None
    states = [span.state for span in parts.workers.drain_timeline().spans]
    assert states[-2:] == [State.GENERATING, State.IDLE]


@pytest.mark.slow
def test_an_interrupted_rollout_leaves_a_worker_that_saves_and_generates_again(workshop, tmp_path):
    plain, asked = _parts(workshop, lambda progress: None)
    expected = [each.tokens for each in plain.workers.rollout(1, asked).completions]
    interrupts = iter([False] * 5 + [True] + [False] * 1000)

    def interrupt(progress: Progress) -> None:
        if next(interrupts):
            raise Interrupted

    parts, asked = _parts(workshop, interrupt)
    with pytest.raises(Interrupted):
        parts.workers.rollout(1, asked)
    parts.workers.abandon()
    assert parts.workers.workers(State.IDLE) == [0]
    assert parts.workers.learner_state().numbers == {"version": 0}
    parts.workers.save_policy(tmp_path)
    assert (tmp_path / "config.json").exists()
    parts.workers.publish()
    assert [each.tokens for each in parts.workers.rollout(1, asked).completions] == expected


@pytest.mark.slow
def test_wait_runs_the_task_and_returns_its_exception(workshop):
    config = load(None, workshop.words("run", "--speculation.drafter=none")[1:])
    parts, _ = _parts(workshop, lambda progress: None)
    make = partial(build_worker, config, workshop.model, parts.limits)
    pool = LocalWorkerPool(make, lambda progress: None)
    (ready,) = pool.wait(0.0)
    assert (ready.worker, ready.is_lost) == (0, False)
    assert pool.wait(0.0) == []
    pool.start(0, Worker.train_drafter, drafter(0, 2.0))
    (ended,) = pool.wait(0.0)
    assert not ended.is_lost
    with pytest.raises(ClusterError, match="no drafter that can be trained"):
        ended.value()
    assert pool.ask(0, Worker.progress) == Progress()
    with pytest.raises(ClusterError, match="cannot be replaced"):
        pool.replace(0)
