"""The pool of one: real machines in this process, no other needed."""

from collections.abc import Callable
from functools import partial

import pytest

from end_to_end.workshop import Workshop, build
from longtail.assembly.trainer import TrainerComponents, assemble
from longtail.assembly.worker import build_worker
from longtail.cluster.pool import LocalWorkerPool
from longtail.cluster.records import Progress
from longtail.cluster.worker import Worker
from longtail.config.rl import load
from longtail.errors import ClusterError
from longtail.rl.data.requests import train_requests
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
