"""The pool of one: real machines in this process, no other needed."""

from functools import partial

import pytest

from end_to_end.workshop import build
from longtail.assembly.trainer import assemble
from longtail.assembly.worker import build_worker
from longtail.cluster.records import Progress
from longtail.cluster.workers.pool import LocalWorkerPool
from longtail.cluster.workers.worker import Worker
from longtail.config.rl import load
from longtail.errors import ClusterError
from support.fake_worker import drafter


@pytest.mark.slow
def test_wait_runs_the_task_and_returns_its_exception(tmp_path):
    workshop = build(tmp_path)
    config = load(None, workshop.words("run", "--speculation.drafter=none")[1:])
    parts = assemble(config, workshop.model, lambda rows: {}, on_progress=lambda progress: None)
    make = partial(build_worker, config, workshop.model, (), parts.limits)
    pool = LocalWorkerPool(make, lambda progress: None)
    (ready,) = pool.wait(0.0)
    assert (ready.worker, ready.is_lost) == (0, False)
    assert pool.wait(0.0) == []
    pool.start(0, Worker.train_drafter, drafter(0, 2.0))
    (ended,) = pool.wait(0.0)
    assert not ended.is_lost
    with pytest.raises(ClusterError, match="no drafter that can be trained"):
        ended.value()
    assert pool.answers(Worker.progress, {0: ()}) == {0: Progress()}
